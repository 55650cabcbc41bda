"""Names that the hosts see late which did not change them, as over NFS.

Rules: a name is late until a drawn time, and for every host but the one that changed it.
"""

from __future__ import annotations

from proof.sim.world import World


class LateNames:
    """Paths, each with the host that changed it and the time at which the others see that."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._until: dict[str, tuple[str, float]] = {}

    def put(self, path: str, host: str, seconds: float) -> None:
        self._until[path] = (host, self._world.now + seconds)

    def forget(self, path: str) -> None:
        self._until.pop(path, None)

    def clear(self) -> None:
        self._until.clear()

    def is_late(self, path: str, host: str) -> bool:
        """True if ``host`` does not see yet what another one did to ``path``."""
        found = self._until.get(path)
        if found is None:
            return False
        who, until = found
        if until <= self._world.now:
            del self._until[path]
            return False
        return who != host

    def seen(self, path: str, host: str) -> None:
        """``host`` has to do with ``path``, and so with all directories that it is in."""
        for each in ancestry(path):
            if self.is_late(each, host):
                self.forget(each)

    def names_in(self, directory: str, host: str) -> set[str]:
        """The names in ``directory`` that are late for ``host``."""
        prefix = f"{directory}/" if directory else ""
        inner = {path[len(prefix) :] for path in self._until if path.startswith(prefix)}
        return {name for name in inner if "/" not in name and self.is_late(prefix + name, host)}


def ancestry(path: str) -> list[str]:
    """``path`` and the directories that it is in, the outermost first."""
    ends = [at for at, letter in enumerate(path) if letter == "/"]
    return [path[:end] for end in ends] + [path]
