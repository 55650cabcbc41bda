"""People beside a simulated job: they put requests into the inbox, as the command line does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptfsm.core.documents import Asked
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.layout import MEGATRON
from ckptfsm.disk.inbox import read_answer, send, take_back
from ckptfsm.disk.ownership import newest_epoch
from proof.sim.site import Site
from proof.sim.storage import WorldStorage
from proof.sim.world import Process

_REQUESTS: tuple[Any, ...] = ("pin", "unpin", "prune", "prune_step", "prune_step", "drop")
_PATIENCE_S = (0.5, 6.0, 15.0)


@dataclass
class Person:
    """Asks for pins and prunes of any step, and may lose patience. ``answered`` counts answers."""

    site: Site
    name: str
    delay_s: float
    host: str = "a"
    rounds: int = 4
    answered: int = 0

    def start(self) -> Person:
        process = self.site.world.process(self.name, self.host, role="person")
        self.site.world.spawn(process, self.name, lambda: self._main(process))
        return self

    def _main(self, process: Process) -> None:
        world = self.site.world
        storage = WorldStorage(self.site, process)
        for number in range(self.rounds):
            world.sleep(world.random.random() * self.delay_s)
            try:
                self._ask(storage, f"{self.name:0>28.28}{number:04d}".translate(_HEX))
            except (OSError, CkptFsmError) as error:  # told, whatever it is: a person may give up
                world.note(self.name, "GAVE UP", type(error).__name__)
        self.site.kill(process)

    def _ask(self, storage: WorldStorage, nonce: str) -> None:
        world = self.site.world
        steps = [
            step for n in storage.listdir("") if (step := MEGATRON.parse_published(n)) is not None
        ]
        epoch = newest_epoch(storage)
        if not steps or not epoch:
            return
        errand = world.random.choice(_REQUESTS)
        step, name = world.random.choice(steps), f"{steps[0]}.e1.a1"
        asked = Asked(nonce=nonce, epoch=epoch, errand=errand, step=step, name=name, by=self.name)
        send(storage, asked)
        world.sleep(world.random.choice(_PATIENCE_S))
        answered = read_answer(storage, nonce)
        if answered is None and not take_back(storage, nonce):
            answered = read_answer(storage, nonce)
        self.answered += answered is not None
        world.note(self.name, errand, answered.words if answered is not None else "no answer")


_HEX = str.maketrans("ghijklmnopqrstuvwxyz", "0123456789abcdef0123")
