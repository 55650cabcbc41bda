"""Mutants of what makes things durable: every fsync left out once, every write made sloppy once."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "segments-are-folded-before-the-new-one-is-durable",
        "engine",
        "        self.ledger = history.ledger\n        self._run_base, self._opened_at",
        "        self.fold(history)\n        self.ledger = history.ledger\n"
        "        self._run_base, self._opened_at",
        (
            "journal",
            '    return [f"{JOURNAL}/{segment_name(s.epoch)}" for s in older if s.epoch in there]\n',
            (
                "    gone = [e for e in there if e < seals[-KEPT_SEGMENTS:][0].epoch]\n"
                '    return [f"{JOURNAL}/{segment_name(e)}" for e in gone]\n'
            ),
        ),
        ("journal", "    MAX_SEGMENT_BYTES,\n", "    KEPT_SEGMENTS,\n    MAX_SEGMENT_BYTES,\n"),
        breaks="I8",
        source="order",
        killers=(
            "tests:test_crash_simulation.py::test_I8_a_crash_at_any_call_of_a_fold_loses_nothing",
        ),
        why="a crash leaves a journal whose newest segment names what is gone",
    ),
    mutant(
        "segments-are-folded-one-opening-too-early",
        "journal",
        '    return [f"{JOURNAL}/{segment_name(s.epoch)}" for s in older if s.epoch in there]\n',
        "    gone = [e for e in there if e < seals[-KEPT_SEGMENTS:][0].epoch]\n"
        '    return [f"{JOURNAL}/{segment_name(e)}" for e in gone]\n',
        ("journal", "    MAX_SEGMENT_BYTES,\n", "    KEPT_SEGMENTS,\n    MAX_SEGMENT_BYTES,\n"),
        breaks="I8",
        source="order",
        killers=(
            "tests:test_crash_simulation.py::test_I8_the_segment_before_the_newest_can_still_be_read",
        ),
        why="where the newest is torn, the one before is read, and names what is gone",
    ),
    mutant(
        "receipts-counted-without-fsync",
        "coordinator",
        '                self._storage.fsync_dir(f"{location}/{RECEIPTS}/{part}")\n',
        "                del part\n",
        breaks="I3",
        source="fsync",
        killers=("tests:test_coordinator.py::test_I3_receipts_counted_when_leaving_are_durable",),
        why="a writer that was killed before it did so itself leaves a name that power may take",
    ),
    # --------------------------------------------------------- what all ranks have in common
    mutant(
        "a-common-state-in-a-shard-is-not-looked-at",
        "stock",
        '    _check_archive(data, piece.file, f"{COMMON_KEY} is ")\n',
        "    del data\n",
        breaks="F21",
        source="F21",
        killers=("tests:test_corruption.py::test_F21_a_common_state_in_a_shard_is_looked_at",),
    ),
    mutant(
        "a-common-file-beside-a-common-state-is-taken",
        "stock",
        "    if COMMON in _names(storage, directory):\n",
        "    if not COMMON:\n",
        breaks="I5",
        source="I5",
        killers=("tests:test_corruption.py::test_F21_a_common_state_in_a_shard_is_looked_at",),
        why="megatron-core 0.19 reads the file first, which an older, interrupted save has left",
    ),
    # ------------------------------------------------------------------------- durable: a file
    mutant(
        "new-file-without-fsync",
        "durable",
        "        write_all(storage, handle, data)\n        storage.fsync(handle)\n",
        "        write_all(storage, handle, data)\n",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "put-without-fsync-of-directory",
        "durable",
        "            raise\n    storage.fsync_dir(parent_of(path))\n",
        "            raise\n",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "put-truncates-in-place",
        "durable",
        """    temporary = _write_temporary(storage, f"{path}{TEMPORARY}{tag}", data)
    if check is not None:
        check()
    try:
        storage.rename(temporary, path)
    except OSError:  # an unknown outcome is decided by looking at both names
        if lookup(storage, temporary) is not None or not content_is(storage, path, data):
            raise
""",
        """    if check is not None:
        check()
    if lookup(storage, path) is not None:
        storage.unlink(path)
    write_new(storage, path, data)
""",
        breaks="I2",
        source="Megatron-LM (tracker)",
        killers=("simulation", "processes"),
        why="as open(tracker, 'w') does: the old content is gone before the new one is there",
    ),
    mutant(
        "put-with-a-fixed-temporary-name",
        "durable",
        '    temporary = _write_temporary(storage, f"{path}{TEMPORARY}{tag}", data)\n',
        """    temporary = f"{path}{TEMPORARY}fixed"
    if lookup(storage, temporary) is not None:
        storage.unlink(temporary)
    write_new(storage, temporary, data)
""",
        breaks="I2",
        source="ferrosa #399",
        killers=("fieldbugs", "simulation"),
        why="two writers of one file share the temporary one",
    ),
    mutant(
        "put-believes-a-failed-rename",
        "durable",
        """        if lookup(storage, temporary) is not None or not content_is(storage, path, data):
            raise
""",
        "        pass\n",
        breaks="I2",
        source="read-back",
        killers=("tests:test_durable.py",),
    ),
    mutant(
        "a-short-write-is-an-end",
        "durable",
        "        view = view[taken:]\n",
        "        return\n",
        breaks="I3",
        source="F7",
        killers=("simulation", "processes"),
    ),
    mutant(
        "foreign-file-without-fsync",
        "durable",
        "    handle = storage.open_existing(path)\n    try:\n        storage.fsync(handle)\n",
        "    handle = storage.open_existing(path)\n    try:\n        pass\n",
        breaks="I3",
        source="fsync",
        killers=("tests:test_durable.py",),
        why="also the older segment's, before it is sealed",
    ),
    # -------------------------------------------------------------------- durable: a directory
    mutant(
        "move-without-fsync-of-target",
        "durable",
        "    storage.fsync_dir(parent_of(dst))\n",
        "",
        breaks="I1",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "move-without-fsync-of-source",
        "durable",
        "    storage.fsync_dir(parent_of(src))\n",
        "",
        breaks="I4",
        source="fsync",
        killers=("simulation",),
        why="what was moved to the trash and emptied there comes back, gutted, at its old name",
    ),
    mutant(
        "move-does-not-look",
        "durable",
        """        if lookup(storage, src) is not None or lookup(storage, dst) is None:
            raise
    if lookup(storage, src) is not None or lookup(storage, dst) is None:
        raise StorageError(f"rename of {src} to {dst} did not happen", file=src, call="rename")
""",
        "        pass\n",
        breaks="I1",
        source="read-back",
        killers=("tests:test_schedules.py", "simulation"),
        why="a rename that failed is taken for done",
    ),
    mutant(
        "what-was-published-late-may-be-back-in-staging",
        "effects",
        '        self.storage.fsync_dir("")\n        self.storage.fsync_dir(STAGING)\n',
        '        self.storage.fsync_dir("")\n',
        breaks="I4",
        source="fsync",
        killers=(
            (
                "tests:test_found_by_proof.py::"
                "test_I4_a_publish_that_lands_late_does_not_come_back_in_staging"
            ),
        ),
        why="a fenced trainer's rename lands after its successor has settled staging",
    ),
    mutant(
        "directories-without-fsync",
        "durable",
        "        storage.fsync_dir(parent)  # also when it was there: a crash may have come before its",
        "        # also when it was there: a crash may have come before its",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "tree-without-fsync",
        "durable",
        "            fsync_tree_dirs(storage, path)\n    storage.fsync_dir(directory)\n",
        "            fsync_tree_dirs(storage, path)\n",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "an-unreadable-name-is-a-missing-one",
        "durable",
        "    except NotADirectoryError:\n        return None\n",
        "    except OSError:\n        return None\n",
        breaks="I8",
        source="F6",
        killers=("tests:test_schedules.py", "simulation"),
        why="EIO says nothing of what is there",
    ),
    # ------------------------------------------------------------------------------- the shards
    mutant(
        "shard-without-fsync",
        "writer",
        "            self._storage.fsync(self._handle)\n",
        "            pass\n",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "names-in-parts-without-fsync",
        "writer",
        "        fsync_tree_dirs(storage, join(job.location, part.directory))\n",
        "        pass\n",
        (
            "effects",
            "        fsync_tree_dirs(self.storage, directory)\n        self.check_epoch()\n",
            "        self.check_epoch()\n",
        ),
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "a-full-disk-makes-short-shards",
        "writer",
        "            self.error = self.error or error\n            raise\n",
        "            self.error = self.error or error\n            return len(view)\n",
        breaks="I3",
        source="metaseq #53",
        killers=("tests:test_writer.py", "simulation"),
        why="the error is swallowed, and a shard of zero bytes gets a receipt",
    ),
    # ------------------------------------------------------------------------------ publishing
    mutant(
        "published-name-without-fsync",
        "effects",
        '            self.storage.fsync_dir("")\n            self.storage.fsync_dir(staging_dir',
        "            self.storage.fsync_dir(staging_dir",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "staging-name-stays-after-publishing",
        "effects",
        '            self.storage.fsync_dir(staging_dir(checkpoint.id).rpartition("/")[0])\n',
        "",
        breaks="I4",
        source="fsync",
        killers=("simulation",),
        why="the rename may be durable at one of its ends only",
    ),
    mutant(
        "adopted-without-fsync",
        "effects",
        """        for file, stat in walk_files(self.storage, name):
            if stat.kind == "file":  # a link of somebody's is never followed (F16)
                fsync_existing(self.storage, f"{name}/{file}")
        self.settle_published(step)
""",
        "",
        breaks="I2",
        source="fsync",
        killers=("tests:test_found_by_review.py",),
        why="an older one is pruned for what a stock trainer left in the page cache",
    ),
    mutant(
        "staging-without-fsync",
        "effects",
        '        self.storage.fsync_dir(directory.rpartition("/")[0])  # whoever made it\n',
        "",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "what-was-moved-is-not-settled",
        "effects",
        "            self.storage.fsync_dir(directory)\n",
        "            pass\n",
        breaks="I1",
        source="fsync",
        killers=("tests:test_schedules.py", "tests:test_found_by_review.py", "simulation"),
        why="a rename found done may not be durable yet",
    ),
    mutant(
        "found-published-without-fsync",
        "effects",
        """        fsync_tree_dirs(self.storage, self.layout.published_name(step))
        self.storage.fsync_dir("")
""",
        "        pass\n",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py", "simulation"),
        why="published by a process that was killed before it could make the name durable",
    ),
    mutant(
        "moved-aside-before-the-tracker-is-durable",
        "effects",
        '        self.storage.fsync_dir("")\n        for suffix in',
        "        for suffix in",
        breaks="I2",
        source="fsync",
        killers=("tests:test_found_by_proof.py",),
    ),
    # ----------------------------------------------------------------------------- the journal
    mutant(
        "record-without-fsync",
        "journal",
        """        self._write(line)
        try:
            self._storage.fsync(self._handle)
        except OSError as error:
""",
        """        self._write(line)
        try:
            pass
        except OSError as error:
""",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "segment-without-fsync",
        "journal",
        "            self._write(line)\n            self._storage.fsync(self._handle)\n",
        "            self._write(line)\n",
        breaks="I11",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "name-of-segment-without-fsync",
        "journal",
        "            self._storage.fsync_dir(JOURNAL)\n",
        "",
        breaks="I11",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "sealed-without-fsync",
        "engine",
        "            self._make_durable(history.seals[-1])\n",
        "            pass\n",
        breaks="I11",
        source="fsync",
        killers=("tests:test_crash_simulation.py::test_I2_sigkill_at_every_storage_call",),
        why="a seal promises bytes that a power loss takes away",
    ),
    mutant(
        "journal-goes-on-after-a-failed-fsync",
        "journal",
        """            self._give_up()  # nobody knows what is on disk: never touch this segment again
            raise OutcomeUnknown(
                f"the journal could not be made durable: {error}", file=self.file
            ) from error
""",
        """            raise StorageError(f"not durable: {error}", file=self.file) from error
""",
        breaks="I11",
        source="F6",
        killers=("simulation", "processes"),
    ),
    mutant(
        "no-reserve-in-the-journal",
        "journal",
        "RESERVE_BYTES = 4 * 1024  #",
        "RESERVE_BYTES = 0  #",
        breaks="I10",
        source="F5",
        killers=("tests:test_journal.py", "simulation"),
        why="on a full disk not even the failure can be written down",
    ),
    # ------------------------------------------------------------------------- markers, epochs
    # ------------------------------------------------------------------------- markers, epochs
    mutant(
        "removed-marker-without-fsync",
        "trash",
        '    storage.unlink(path)\n    storage.fsync_dir(path.rpartition("/")[0])\n',
        "    storage.unlink(path)\n",
        breaks="I7",
        source="fsync",
        killers=("tests:test_trash.py", "simulation"),
        why="a pin that was given up comes back",
    ),
    mutant(
        "directories-of-the-root-without-fsync",
        "lease",
        "        storage.fsync_dir(directory)  # a killed process may have left names that are not",
        "        pass  # a killed process may have left names that are not",
        breaks="I8",
        source="fsync",
        killers=("simulation",),
    ),
    # ---------------------------------------------------------------------------- the real disk
    mutant(
        "posix-fsync-does-nothing",
        "storage",
        "        with _named(self._path_of(handle)):\n            os.fsync(handle)\n",
        "        with _named(self._path_of(handle)):\n            pass\n",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py",),
    ),
    mutant(
        "posix-fsync-of-directories-does-nothing",
        "storage",
        "changes=False) as fd:\n            os.fsync(fd)\n",
        "changes=False) as fd:\n            os.fstat(fd)\n",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py",),
    ),
    mutant(
        "root-made-without-fsync",
        "storage",
        "    try:\n        os.fsync(fd)\n",
        "    try:\n        os.fstat(fd)\n",
        breaks="I2",
        source="fsync",
        killers=("tests:test_storage_contract.py",),
        why="a new root, with the first checkpoint in it, is lost with its name",
    ),
    mutant(
        "remote-copy-without-fsync",
        "integrations.verl.mirror",
        "                    os.fsync(written.fileno())\n",
        "                    written.fileno()\n",
        breaks="I2",
        source="fsync",
        killers=("tests:test_uploads.py::test_a_copy_is_fsynced_before_it_has_its_name",),
        why="tracked once it is uploaded, and the copy is empty after a power loss",
    ),
    mutant(
        "remote-copy-names-without-fsync",
        "integrations.verl.mirror",
        "            fsync_tree_dirs(storage, partial.name)\n",
        "",
        breaks="I2",
        source="fsync",
        killers=("tests:test_uploads.py::test_a_copy_is_fsynced_before_it_has_its_name",),
        why="tracked once it is uploaded, and the copy has no names after a power loss",
    ),
    mutant(
        "posix-open-truncates",
        "storage",
        "_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL |",
        "_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC |",
        breaks="I5",
        source="Megatron-core (late writer)",
        killers=("tests:test_storage_contract.py",),
        why="a late writer truncates the shard of the attempt after it",
    ),
    mutant(
        "posix-follows-links",
        "storage",
        "_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW |",
        "_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY |",
        breaks="F16",
        source="F16",
        killers=("tests:test_storage_contract.py", "corruption"),
    ),
)
