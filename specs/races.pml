/*
 * A model for spin: races between checks and effects on one root, where no lock protects them.
 *
 * Every look at the disk and every change of it is a separate step. Between any two steps the other
 * processes may do anything, and a process may stop for ever (die) or wake much later (a zombie).
 * A process keeps its observations in local variables and acts on them, however stale.
 *
 *   first    a trainer, epoch 1. Step 1 and 2 are tracked, the tracker says 2. The trainer prunes 1,
 *            saves 3, and empties the trash, in any order.
 *   second   a trainer that takes the root over at any moment (epoch 2). The trainer recovers from the
 *            journal of the first as it is at that moment, saves 4, prunes 1 and 3, empties the trash.
 *   reader   an evaluator: puts its lease on step 1, then looks whether it is there, reads, lets go.
 *   judge    looks when both trainers have come to an end.
 *
 * With -DTAKING instead: three trainers that take the root (newest epoch + 1, by link; remove older
 * ones) and then work.
 *
 * Asserted:
 *   I9   Of a fenced trainer at most one operation lands: the one that was checked before the fence.
 *   F27  A reader that was told "there" never finds a file of the step deleted, and finds the step
 *        under its name when the trainers have come to an end.
 *   I2   In the end the tracker names the step that the newest trainer tracked last, and that step is
 *        there.
 *   I4   A directory that has its name was not emptied.
 *
 * For an older step, that one operation of a fenced trainer may break F27 and I4, and nothing else may:
 * POSIX has no compare-and-swap. Whatever lands, the newest trainer's tracker and newest checkpoint are
 * untouched. For the tracker that rests on the sweep: opening a root deletes the temporary file that a
 * zombie would still rename.
 *
 * Accepted, with a counterexample each (races.py replays them on production):
 *   -DSTRICT_AWAY     "there" at every moment: a prune may have the step aside between two looks.
 *   -DSTRICT_READER   No exception for the reader: a zombie empties, or moves aside, after its check.
 *
 * Controls, each of which must find a counterexample: -DNO_SECOND_LOOK, -DLOOK_BEFORE_LEASE,
 * -DNO_EPOCH_CHECK, -DEMPTY_UNDECIDED, -DFORGETFUL_RECOVERY, -DNO_SWEEP; with -DTAKING: -DNO_LINK,
 * -DNO_EPOCH_CHECK.
 *
 * Rules: the order of the steps is that of disk/ownership.py, disk/publishing.py,
 * disk/setting_aside.py, coordinator/applier.py, core/recovery.py and disk/reader_lease.py. A change of
 * that order there needs the same change here.
 *
 * Not modelled: power loss and the number of anything (inductive.py), leases that expire, errors of the
 * disk but one: the way back may fail once.
 */

#define FIRST 1
#define SECOND 2
#define STEPS 5
#ifndef READERS
#define READERS 1
#endif

mtype = { absent, staging, published, trash, deleted }; /* where a directory is */
mtype = { unknown, written, finalized, tracked, prunable, pruned }; /* the state in a journal */

byte newest = FIRST;  /* the newest epoch in lease/ */
byte landed[4];       /* operations of a trainer that landed after it was fenced */

/* An effect: it counts once per operation if its trainer is fenced by now (I9). */
inline act(me) {
  if
  :: newest != me && !counted -> counted = true; landed[me]++; assert(landed[me] <= 1)
  :: else
  fi
}

/* Begin an operation: look who owns the root; the look may be old when the effect comes. */
inline check(me) {
#ifdef NO_EPOCH_CHECK
  counted = false
#else
  atomic {
    if
    :: newest != me -> goto fenced
    :: else -> counted = false
    fi
  }
#endif
}

#ifdef TAKING

#define EPOCHS 7
#define TRAINERS 3
bool epoch[EPOCHS];
byte holds[TRAINERS];

inline see_newest(into) {
  d_step {
    into = EPOCHS - 1;
    do
    :: into > 0 && !epoch[into] -> into--
    :: else -> break
    od
  }
}

inline unique() {
  d_step {
    see_newest(top);
    assert(!(holds[0] == top && holds[1] == top) && !(holds[0] == top && holds[2] == top)
           && !(holds[1] == top && holds[2] == top) || top == 0);
    top = 0
  }
}

proctype taker(byte who) {
  byte mine, seen, older, top, effects;
  bool old[EPOCHS];
  see_newest(seen);
  mine = seen + 1;
  do /* link: fails if the name exists */
#ifdef NO_LINK
  :: !epoch[mine] -> skip; epoch[mine] = true; break
#else
  :: atomic { !epoch[mine] -> epoch[mine] = true }; break
#endif
  :: epoch[mine] -> mine++
  od;
  atomic { holds[who] = mine; unique() }
  d_step { /* list the older ones, then remove them one by one */
    older = 1;
    do
    :: older < mine -> old[older] = epoch[older]; older++
    :: else -> break
    od;
    older = 1
  }
  do
  :: older < mine && old[older] -> epoch[older] = false; older++
  :: older < mine && !old[older] -> older++
  :: else -> break
  od;
  do /* work: check, then one effect */
  :: effects < 2 ->
     see_newest(seen);
#ifndef NO_EPOCH_CHECK
     if
     :: seen != mine -> break
     :: else
     fi;
#endif
     atomic {
       see_newest(seen);
       if
       :: seen != mine -> landed[who]++; assert(landed[who] <= 1)
       :: else
       fi;
       unique();
       effects++; seen = 0
     }
  :: else -> break
  od;
  holds[who] = 0
}

init {
  byte who;
  atomic {
    do
    :: who < TRAINERS -> run taker(who); who++
    :: else -> break
    od
  }
}

#else

mtype at[STEPS];
bool gutted[STEPS];   /* files of it were deleted */
byte tracker = 2;
bool lease[READERS];
bool held[READERS];   /* was told that it is there, and has not let go */
mtype says[10];       /* the state of each step in the journal of each trainer */
bool first_done, second_done;
bool failed_once;
bool temporary[3];    /* of the tracker, complete and not yet renamed */
byte latest = 2;      /* the step that the newest trainer tracked last */

#define BOOK(me, s) says[(me - 1) * STEPS + s]
#define EXCUSED (landed[FIRST] > 0)
#define SOMEBODY_READS held[0]

inline see_leases(into) { /* the listing of leases/ for step 1 */
  atomic {
    into = false;
    byte reader_ = 0;
    do
    :: reader_ < READERS -> into = into || lease[reader_]; reader_++
    :: else -> break
    od;
    reader_ = 0
  }
}

/* rename, and the effects that follow; moved is false if there was nothing to rename */
inline move(me, s, from, to) {
  atomic {
    if
    :: at[s] == from -> act(me); at[s] = to; moved = true; on_move(s)
    :: else -> moved = false
    fi
  }
}

inline on_move(s) {
#ifdef STRICT_AWAY
  assert(s != 1 || at[1] == published || !SOMEBODY_READS)
#else
  skip
#endif
}

inline may_die() {
  if
  :: true
  :: goto fenced
  fi
}

/* Mover.prune and Applier._run_prune */
inline prune(me, s) {
  BOOK(me, s) = prunable;
  check(me);
  if
  :: at[s] == published ->
     kept = false;
     if
     :: s == 1 -> see_leases(kept)
     :: else
     fi;
     if
     :: tracker <= s -> kept = true
     :: else
     fi;
     if
     :: kept -> BOOK(me, s) = tracked
     :: else ->
        move(me, s, published, trash);
        if
        :: moved -> may_die(); second_look(me, s)
        :: else /* an error: pending */
        fi
     fi
  :: else -> second_look(me, s)
  fi
}

inline second_look(me, s) {
  kept = false;
#ifndef NO_SECOND_LOOK
  if
  :: s == 1 -> see_leases(kept)
  :: else
  fi;
#endif
  if
  :: kept && !failed_once -> failed_once = true /* an error: pending */
  :: kept ->
     move(me, s, trash, published);
     if
     :: moved -> BOOK(me, s) = tracked
     :: else
     fi
  :: else -> BOOK(me, s) = pruned
  fi
}

/* coordinator.tick: pending commands are tried again */
inline retry(me) {
  if
  :: BOOK(me, 1) == prunable -> prune(me, 1)
  :: else
  fi
}

#ifdef EMPTY_UNDECIDED
#define UNDECIDED(me, s) false
#else
#define UNDECIDED(me, s) (BOOK(me, s) == prunable)
#endif

/* Applier.give_space_back: list, then delete every listed directory that is not undecided. Production
   deletes less: only directories under a given-up name, a rename that follows the journal's record */
inline empty_trash(me) {
  check(me);
  victim = 1;
  do
  :: atomic { victim < STEPS && (at[victim] != trash || UNDECIDED(me, victim)) -> victim++ }
  :: atomic { victim < STEPS && at[victim] == trash && !UNDECIDED(me, victim) -> skip };
     gut(me); may_die(); remove(me)
  :: atomic { victim == STEPS -> victim = 0; break }
  od
}

inline gut(me) {
  atomic {
    if
    :: at[victim] == trash ->
       act(me);
       gutted[victim] = true;
       assert(victim != latest);
#ifdef STRICT_READER
       assert(victim != 1 || !SOMEBODY_READS)
#else
       assert(victim != 1 || !SOMEBODY_READS || EXCUSED)
#endif
    :: else
    fi
  }
}

inline remove(me) {
  atomic {
    if
    :: at[victim] == trash -> act(me); at[victim] = deleted
    :: else
    fi;
    victim++
  }
}

/* Publisher.write_tracker: the check comes just before the rename, the look back after it */
inline write_tracker(me, s) {
  check(me);
  temporary[me] = true;
  check(me);
  may_die();
  atomic {
    if
    :: !temporary[me] -> goto fenced /* swept: the rename fails, and the next check */
    :: else
    fi;
    act(me);
    temporary[me] = false;
    tracker = s;
    if
    :: newest == me -> latest = s
    :: else
    fi
  }
  if
  :: tracker != s -> goto fenced /* outcome unknown */
  :: else
  fi
}

proctype first() {
  bool counted, kept, moved, did_prune, did_save, did_empty;
  byte victim;
  do
  :: !did_prune -> did_prune = true; prune(FIRST, 1)
  :: !did_save ->
     did_save = true;
     at[3] = staging; /* no other process uses this name */
     BOOK(FIRST, 3) = written;
     check(FIRST);
     move(FIRST, 3, staging, published);
     if
     :: !moved -> goto fenced /* outcome unknown: another process moved it */
     :: else
     fi;
     BOOK(FIRST, 3) = finalized;
     write_tracker(FIRST, 3);
     BOOK(FIRST, 3) = tracked
  :: !did_empty -> did_empty = true; empty_trash(FIRST)
  :: true -> break
  od;
  retry(FIRST);
fenced:
  skip;
  atomic { counted = false; kept = false; moved = false; victim = 0; first_done = true }
}

/* recovery.plan, as the coordinator carries it out */
inline recover_pruned() {
  if
  :: BOOK(SECOND, 1) == prunable && at[1] == published -> BOOK(SECOND, 1) = tracked
  :: BOOK(SECOND, 1) == prunable && at[1] != published ->
#ifdef FORGETFUL_RECOVERY
     BOOK(SECOND, 1) = pruned
#else
     check(SECOND);
     second_look(SECOND, 1)
#endif
  :: BOOK(SECOND, 1) == tracked && at[1] != published -> BOOK(SECOND, 1) = unknown /* withdrawn as damaged */
  :: else
  fi
}

inline recover_saved() {
  if
  :: BOOK(SECOND, 3) == written && at[3] == staging ->
     check(SECOND);
     move(SECOND, 3, staging, published)
  :: else
  fi;
  if
  :: (BOOK(SECOND, 3) == written || BOOK(SECOND, 3) == finalized) && at[3] == published ->
     write_tracker(SECOND, 3);
     BOOK(SECOND, 3) = tracked
  :: BOOK(SECOND, 3) == tracked && tracker != 3 -> write_tracker(SECOND, 3)
  :: BOOK(SECOND, 3) != tracked && BOOK(SECOND, 3) != written && BOOK(SECOND, 3) != finalized && tracker != 2 ->
     write_tracker(SECOND, 2) /* _repair_tracker */
  :: BOOK(SECOND, 3) == tracked && tracker == 3 -> latest = 3
  :: else
  fi
}

proctype second() {
  bool counted, kept, moved, did_save, did_prune, did_third, did_empty;
  byte victim;
  atomic { newest = SECOND }
  atomic { /* the journal of the first, up to the seal */
    BOOK(SECOND, 1) = BOOK(FIRST, 1); BOOK(SECOND, 2) = tracked; BOOK(SECOND, 3) = BOOK(FIRST, 3)
  }
#ifndef NO_SWEEP
  temporary[FIRST] = false; /* trash.sweep_temporaries */
#endif
  recover_pruned();
  recover_saved();
  do
  :: !did_save ->
     did_save = true;
     at[4] = staging;
     check(SECOND);
     move(SECOND, 4, staging, published);
     write_tracker(SECOND, 4);
     BOOK(SECOND, 4) = tracked
  :: !did_prune && BOOK(SECOND, 1) == tracked ->
     did_prune = true;
     prune(SECOND, 1)
  :: !did_third && BOOK(SECOND, 3) == tracked && BOOK(SECOND, 4) == tracked ->
     did_third = true;
     prune(SECOND, 3)
  :: !did_empty -> did_empty = true; empty_trash(SECOND)
  :: true -> break
  od;
  retry(SECOND);
  atomic { counted = false; kept = false; moved = false; victim = 0; second_done = true };
  goto end;
fenced: /* dead, or stopped: the next opening recovers */
  skip;
end:
  skip
}

proctype reader(byte me) {
  bool there;
#ifdef LOOK_BEFORE_LEASE
  there = (at[1] == published);
  lease[me] = true;
  held[me] = there;
#else
  lease[me] = true;
  atomic { there = (at[1] == published); held[me] = there }
#endif
  if
  :: there ->
     assert(!gutted[1] || EXCUSED); /* reads */
     held[me] = false
  :: else /* told that it is gone */
  fi;
  lease[me] = false
}

proctype judge() {
  atomic {
    first_done && second_done ->
    assert(tracker == latest);
    assert(at[tracker] == published && !gutted[tracker]);
    assert(!SOMEBODY_READS || (at[1] == published && !gutted[1]) || EXCUSED);
    assert(!(at[1] == published && gutted[1]) || EXCUSED)
  }
}

init {
  byte who;
  atomic {
    at[1] = published; at[2] = published; at[3] = absent; at[4] = absent; at[0] = absent;
    BOOK(FIRST, 1) = tracked; BOOK(FIRST, 2) = tracked; BOOK(FIRST, 3) = unknown; BOOK(FIRST, 4) = unknown;
    BOOK(SECOND, 1) = unknown; BOOK(SECOND, 2) = unknown; BOOK(SECOND, 3) = unknown; BOOK(SECOND, 4) = unknown;
    run first(); run second(); run judge();
    do
    :: who < READERS -> run reader(who); who++
    :: else -> break
    od
  }
}

#endif
