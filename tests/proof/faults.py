"""Which fault can strike in which state of a checkpoint: what a whole run must have exercised.

The state is that of the checkpoint in flight, or of the newest one, when the fault struck; ``absent`` is
a root without any. What is not listed cannot happen or means the same thing there: a writer that died
after its receipt (F1) is a rank that died (F2). What people and machines do to a root between two jobs
(F16 to F21, F26, F30, F34) meets what the last job left behind; ``absent`` is also a root whose newest
journal has nothing left in flight or tracked. An interrupted deletion (F17) is ``prunable``.
One of several parts (F23) is late or fails while its attempt is being written: nothing is
``shards_written`` without it. Who does not poll after a save (F28) reports nothing of it, so the save
stays ``requested``.

Of F29 the simulation has writers that live on while the next job starts, and judges that no start is
refused for them; that they die and hold nothing is told by real processes (``megatron_kills``), where
no checkpoint's state matters.
"""

from __future__ import annotations

from types import MappingProxyType

_WRITING = ("requested", "forked", "shards_written")
_LIVING = (*_WRITING, "finalized", "tracked", "prunable", "failed")

APPLICABLE: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "F1": ("requested", "forked"),
        "F2": _LIVING,
        "F3": ("finalized",),
        "F4": (*_LIVING, "absent"),
        "F5": (*_LIVING, "absent"),
        "F6": (*_WRITING, "tracked", "failed", "absent"),
        "F7": (*_LIVING, "absent"),
        "F8": (*_LIVING, "absent"),
        "F9": _WRITING,
        "F10": ("requested", "forked", "failed"),
        "F11": (*_WRITING, "failed"),
        "F12": ("requested", "shards_written", "tracked"),
        "F13": (*_WRITING, "tracked"),
        "F14": (*_LIVING, "absent"),
        "F15": ("absent", "tracked", "failed"),
        "F16": ("absent", "forked", "shards_written", "tracked"),
        "F17": ("prunable",),
        "F18": ("absent", *_WRITING, "tracked", "failed"),
        "F19": (*_WRITING, "tracked", "failed"),
        "F20": ("absent", *_WRITING, "finalized", "tracked", "failed"),
        "F21": ("requested", "shards_written", "tracked"),
        "F22": (*_WRITING, "finalized"),
        "F23": ("requested", "forked", "failed"),
        "F24": _LIVING,
        "F25": _WRITING,
        "F26": _LIVING,
        "F27": (*_WRITING, "tracked", "prunable"),
        "F28": ("requested",),
        "F29": ("forked", "any"),
        "F30": ("shards_written", "tracked", "quarantined", "any"),
        "F31": ("requested", "tracked"),
        "F32": ("requested", "shards_written", "tracked"),
        "F33": ("requested", "shards_written", "absent"),
        "F34": ("absent", "shards_written", "tracked", "failed"),
    }
)
