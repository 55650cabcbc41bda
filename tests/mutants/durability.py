"""Mutants of what makes things durable: every fsync left out once, every write made sloppy once."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "segments-are-folded-before-the-new-one-is-durable",
        "coordinator.engine:Engine.begin",
        "self.ledger = history.ledger\nself._run_base, self._opened_at",
        "self.fold(history)\nself.ledger = history.ledger\nself._run_base, self._opened_at",
        (
            "disk.journal:folded",
            'return [f"{JOURNAL}/{segment_name(s.epoch)}" for s in older if s.epoch in there]',
            (
                "gone = [e for e in there if e < seals[-KEPT_SEGMENTS:][0].epoch]\n"
                'return [f"{JOURNAL}/{segment_name(e)}" for e in gone]'
            ),
        ),
        ("disk.journal:", "MAX_SEGMENT_BYTES,", ("KEPT_SEGMENTS,\nMAX_SEGMENT_BYTES,")),
        breaks="I8",
        source="order",
        killers=(
            "tests:test_crash_simulation.py::test_I8_a_crash_at_any_call_of_a_fold_loses_nothing",
        ),
        why="a crash leaves a journal whose newest segment names what is gone",
    ),
    mutant(
        "segments-are-folded-one-opening-too-early",
        "disk.journal:folded",
        'return [f"{JOURNAL}/{segment_name(s.epoch)}" for s in older if s.epoch in there]',
        "gone = [e for e in there if e < seals[-KEPT_SEGMENTS:][0].epoch]\n"
        'return [f"{JOURNAL}/{segment_name(e)}" for e in gone]',
        ("disk.journal:", "MAX_SEGMENT_BYTES,", ("KEPT_SEGMENTS,\nMAX_SEGMENT_BYTES,")),
        breaks="I8",
        source="order",
        killers=(
            "tests:test_crash_simulation.py::test_I8_the_segment_before_the_newest_can_still_be_read",
        ),
        why="where the newest is torn, the one before is read, and names what is gone",
    ),
    mutant(
        "receipts-counted-without-fsync",
        "coordinator.coordinator:Coordinator._from_receipts",
        'self._storage.fsync_dir(f"{location}/{RECEIPTS}/{part}")',
        "del part",
        breaks="I3",
        source="fsync",
        killers=("tests:test_coordinator.py::test_I3_receipts_counted_when_leaving_are_durable",),
        why="a writer that was killed before it did so itself leaves a name that power may take",
    ),
    # --------------------------------------------------------- what all ranks have in common
    mutant(
        "a-common-state-in-a-shard-is-not-looked-at",
        "disk.stock:_check_common_object",
        '_check_archive(data, piece.file, f"{COMMON_KEY} is ")',
        "del data",
        breaks="F21",
        source="F21",
        killers=("tests:test_corruption.py::test_F21_a_common_state_in_a_shard_is_looked_at",),
    ),
    mutant(
        "a-common-file-beside-a-common-state-is-taken",
        "disk.stock:_check_common_object",
        "if COMMON in _names(storage, directory):",
        "if not COMMON:",
        breaks="I5",
        source="I5",
        killers=("tests:test_corruption.py::test_F21_a_common_state_in_a_shard_is_looked_at",),
        why="megatron-core 0.19 reads the file first, which an older, interrupted save has left",
    ),
    # ------------------------------------------------------------------------- durable: a file
    mutant(
        "new-file-without-fsync",
        "disk.durable:write_new",
        "write_all(storage, handle, data)\nstorage.fsync(handle)",
        "write_all(storage, handle, data)",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "put-without-fsync-of-directory",
        "disk.durable:put",
        "raise\nstorage.fsync_dir(parent_of(path))",
        "raise",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "put-truncates-in-place",
        "disk.durable:put",
        'temporary = _write_temporary(storage, f"{path}{TEMPORARY}{tag}", data)\n'
        "if check is not None:\n"
        "    check()\n"
        "try:\n"
        "    storage.rename(temporary, path)\n"
        "except OSError:  # an unknown outcome is decided by looking at both names\n"
        "    if lookup(storage, temporary) is not None or not content_is(storage, path, data):\n"
        "        raise",
        "if check is not None:\n"
        "    check()\n"
        "if lookup(storage, path) is not None:\n"
        "    storage.unlink(path)\n"
        "write_new(storage, path, data)",
        breaks="I2",
        source="Megatron-LM (tracker)",
        killers=("simulation", "processes"),
        why="as open(tracker, 'w') does: the old content is gone before the new one is there",
    ),
    mutant(
        "put-with-a-fixed-temporary-name",
        "disk.durable:put",
        'temporary = _write_temporary(storage, f"{path}{TEMPORARY}{tag}", data)',
        'temporary = f"{path}{TEMPORARY}fixed"\n'
        "if lookup(storage, temporary) is not None:\n"
        "    storage.unlink(temporary)\n"
        "write_new(storage, temporary, data)",
        breaks="I2",
        source="ferrosa #399",
        killers=("fieldbugs", "simulation"),
        why="two writers of one file share the temporary one",
    ),
    mutant(
        "put-believes-a-failed-rename",
        "disk.durable:put",
        "if lookup(storage, temporary) is not None or not content_is(storage, path, data):\n"
        "    raise",
        "pass",
        breaks="I2",
        source="read-back",
        killers=("tests:test_durable.py",),
    ),
    mutant(
        "a-short-write-is-an-end",
        "disk.durable:write_all",
        "view = view[taken:]",
        "return",
        breaks="I3",
        source="F7",
        killers=("simulation", "processes"),
    ),
    mutant(
        "foreign-file-without-fsync",
        "disk.durable:fsync_existing",
        "handle = storage.open_existing(path)\ntry:\n    storage.fsync(handle)",
        "handle = storage.open_existing(path)\ntry:\n    pass",
        breaks="I3",
        source="fsync",
        killers=("tests:test_durable.py",),
        why="also the older segment's, before it is sealed",
    ),
    # -------------------------------------------------------------------- durable: a directory
    mutant(
        "move-without-fsync-of-target",
        "disk.durable:move",
        "storage.fsync_dir(parent_of(dst))",
        "",
        breaks="I1",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "move-without-fsync-of-source",
        "disk.durable:move",
        "storage.fsync_dir(parent_of(src))",
        "",
        breaks="I4",
        source="fsync",
        killers=("simulation",),
        why="what was moved to the trash and emptied there comes back, gutted, at its old name",
    ),
    mutant(
        "move-does-not-look",
        "disk.durable:move",
        "if lookup(storage, src) is not None or lookup(storage, dst) is None:\n"
        "    raise\n"
        "if lookup(storage, src) is not None or lookup(storage, dst) is None:\n"
        'raise StorageError(f"rename of {src} to {dst} did not happen", file=src, call="rename")',
        "pass",
        breaks="I1",
        source="read-back",
        killers=("tests:test_schedules.py", "simulation"),
        why="a rename that failed is taken for done",
    ),
    mutant(
        "what-was-published-late-may-be-back-in-staging",
        "disk.publishing:Publisher.make_published_durable",
        'self.storage.fsync_dir("")\nself.storage.fsync_dir(STAGING)',
        'self.storage.fsync_dir("")',
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
        "disk.durable:make_dirs",
        "storage.fsync_dir(parent)  # also when it was there: a crash may have come before its",
        "# also when it was there: a crash may have come before its",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "tree-without-fsync",
        "disk.durable:fsync_tree_dirs",
        "fsync_tree_dirs(storage, path)\nstorage.fsync_dir(directory)",
        "fsync_tree_dirs(storage, path)",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "an-unreadable-name-is-a-missing-one",
        "disk.durable:lookup",
        "except NotADirectoryError:\n    return None",
        "except OSError:\n    return None",
        breaks="I8",
        source="F6",
        killers=("tests:test_schedules.py", "simulation"),
        why="EIO says nothing of what is there",
    ),
    # ------------------------------------------------------------------------------- the shards
    mutant(
        "shard-without-fsync",
        "writers.shard_file:ShardFile.close_durably",
        "self._storage.fsync(self._handle)",
        "pass",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "names-in-parts-without-fsync",
        "writers.rank_writer:put_receipt",
        "fsync_tree_dirs(storage, join(job.location, part.directory))",
        "pass",
        (
            "disk.publishing:Publisher.finalize",
            ("fsync_tree_dirs(self.storage, directory)\nself.check_epoch()"),
            "self.check_epoch()",
        ),
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "a-full-disk-makes-short-shards",
        "writers.shard_file:ShardFile.write",
        "self.error = self.error or error\nraise",
        "self.error = self.error or error\nreturn len(view)",
        breaks="I3",
        source="metaseq #53",
        killers=("tests:test_rank_writer.py", "simulation"),
        why="the error is swallowed, and a shard of zero bytes gets a receipt",
    ),
    # ------------------------------------------------------------------------------ publishing
    mutant(
        "published-name-without-fsync",
        "disk.publishing:Publisher._fsync_names",
        'self.storage.fsync_dir("")\nself.storage.fsync_dir(staging_dir',
        "self.storage.fsync_dir(staging_dir",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "staging-name-stays-after-publishing",
        "disk.publishing:Publisher._fsync_names",
        'self.storage.fsync_dir(staging_dir(checkpoint.id).rpartition("/")[0])',
        "",
        breaks="I4",
        source="fsync",
        killers=("simulation",),
        why="the rename may be durable at one of its ends only",
    ),
    mutant(
        "adopted-without-fsync",
        "disk.publishing:Publisher.make_adopted_durable",
        "for file, stat in walk_files(self.storage, name):\n"
        '    if stat.kind == "file":  # a link of somebody\'s is never followed (F16)\n'
        '        fsync_existing(self.storage, f"{name}/{file}")\n'
        "self.make_published_durable(step)",
        "",
        breaks="I2",
        source="fsync",
        killers=("tests:test_found_by_review.py",),
        why="an older one is pruned for what a stock trainer left in the page cache",
    ),
    mutant(
        "staging-without-fsync",
        "disk.publishing:Publisher.create_staging",
        'self.storage.fsync_dir(directory.rpartition("/")[0])  # whoever made it',
        "",
        breaks="I3",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "what-was-moved-is-not-settled",
        "disk.setting_aside:Mover._make_durable",
        "self.storage.fsync_dir(directory)",
        "pass",
        breaks="I1",
        source="fsync",
        killers=("tests:test_schedules.py", "tests:test_found_by_review.py", "simulation"),
        why="a rename found done may not be durable yet",
    ),
    mutant(
        "found-published-without-fsync",
        "disk.publishing:Publisher.make_published_durable",
        "fsync_tree_dirs(self.storage, self.layout.published_name(step))\n"
        'self.storage.fsync_dir("")',
        "pass",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py", "simulation"),
        why="published by a process that was killed before it could make the name durable",
    ),
    mutant(
        "moved-aside-before-the-tracker-is-durable",
        "disk.setting_aside:move_aside",
        'storage.fsync_dir("")\nfor suffix in',
        "for suffix in",
        breaks="I2",
        source="fsync",
        killers=("tests:test_found_by_proof.py",),
    ),
    # ----------------------------------------------------------------------------- the journal
    mutant(
        "record-without-fsync",
        "disk.journal:JournalWriter.append",
        "self._write(line)\ntry:\n    self._storage.fsync(self._handle)\nexcept OSError as error:",
        "self._write(line)\ntry:\n    pass\nexcept OSError as error:",
        breaks="I2",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "segment-without-fsync",
        "disk.journal:JournalWriter.open",
        "self._write(line)\nself._storage.fsync(self._handle)",
        "self._write(line)",
        breaks="I11",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "name-of-segment-without-fsync",
        "disk.journal:JournalWriter.open",
        "self._storage.fsync_dir(JOURNAL)",
        "",
        breaks="I11",
        source="fsync",
        killers=("simulation",),
    ),
    mutant(
        "sealed-without-fsync",
        "coordinator.engine:Engine.begin",
        "self._make_durable(history.seals[-1])",
        "pass",
        breaks="I11",
        source="fsync",
        killers=("tests:test_crash_simulation.py::test_I2_sigkill_at_every_storage_call",),
        why="a seal promises bytes that a power loss takes away",
    ),
    mutant(
        "journal-goes-on-after-a-failed-fsync",
        "disk.journal:JournalWriter.append",
        "self._give_up()  # nobody knows what is on disk: never touch this segment again\n"
        "raise OutcomeUnknown(\n"
        '    f"the journal could not be made durable: {error}", file=self.file\n'
        ") from error",
        'raise StorageError(f"not durable: {error}", file=self.file) from error',
        breaks="I11",
        source="F6",
        killers=("simulation", "processes"),
    ),
    mutant(
        "no-reserve-in-the-journal",
        "disk.journal:RESERVE_BYTES",
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
        "disk.trash:remove_marker",
        'storage.unlink(path)\nstorage.fsync_dir(path.rpartition("/")[0])',
        "storage.unlink(path)",
        breaks="I7",
        source="fsync",
        killers=("tests:test_trash.py", "simulation"),
        why="a pin that was given up comes back",
    ),
    mutant(
        "directories-of-the-root-without-fsync",
        "disk.ownership:open_root",
        "storage.fsync_dir(directory)  # a killed process may have left names that are not",
        "pass  # a killed process may have left names that are not",
        breaks="I8",
        source="fsync",
        killers=("simulation",),
    ),
    # ---------------------------------------------------------------------------- the real disk
    mutant(
        "posix-fsync-does-nothing",
        "adapters.posix_storage:PosixStorage.fsync",
        "with _named(self._path_of(handle)):\n    os.fsync(handle)",
        "with _named(self._path_of(handle)):\n    pass",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py",),
    ),
    mutant(
        "posix-fsync-of-directories-does-nothing",
        "adapters.posix_storage:PosixStorage.fsync_dir",
        "changes=False) as fd:\n    os.fsync(fd)",
        "changes=False) as fd:\n    os.fstat(fd)",
        breaks="I3",
        source="fsync",
        killers=("tests:test_schedules.py",),
    ),
    mutant(
        "root-made-without-fsync",
        "adapters.posix_storage:_fsync_path",
        "try:\n    os.fsync(fd)",
        "try:\n    os.fstat(fd)",
        breaks="I2",
        source="fsync",
        killers=("tests:test_posix_storage.py",),
        why="a new root, with the first checkpoint in it, is lost with its name",
    ),
    mutant(
        "remote-copy-without-fsync",
        "integrations.verl.mirror:DirectoryMirror._upload",
        "os.fsync(written.fileno())",
        "written.fileno()",
        breaks="I2",
        source="fsync",
        killers=("tests:test_uploads.py::test_a_copy_is_fsynced_before_it_has_its_name",),
        why="tracked once it is uploaded, and the copy is empty after a power loss",
    ),
    mutant(
        "remote-copy-names-without-fsync",
        "integrations.verl.mirror:DirectoryMirror._upload",
        "fsync_tree_dirs(storage, partial.name)",
        "",
        breaks="I2",
        source="fsync",
        killers=("tests:test_uploads.py::test_a_copy_is_fsynced_before_it_has_its_name",),
        why="tracked once it is uploaded, and the copy has no names after a power loss",
    ),
    mutant(
        "posix-open-truncates",
        "adapters.posix_storage:_EXCLUSIVE",
        "_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL |",
        "_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC |",
        breaks="I5",
        source="Megatron-core (late writer)",
        killers=("tests:test_posix_storage.py",),
        why="a late writer truncates the shard of the attempt after it",
    ),
    mutant(
        "posix-follows-links",
        "adapters.posix_storage:_DIRECTORY",
        "_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW |",
        "_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY |",
        breaks="F16",
        source="F16",
        killers=("tests:test_posix_storage.py", "corruption"),
    ),
)
