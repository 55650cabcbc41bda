"""ckptfsm, as on its page of plain torch."""

from __future__ import annotations

from training import EVERY, KEPT, arguments, make, update

from ckptfsm import CheckpointManager, LatestN, TrainingState


def main() -> None:
    root, last = arguments()
    model, optimizer = make()
    state = TrainingState(model, optimizer)
    with CheckpointManager(root, retention=LatestN(KEPT), save_interval_steps=EVERY) as ckpts:
        ckpts.attach(optimizer)
        for step in range(state.restore(ckpts) + 1, last + 1):
            update(model, optimizer, step)
            if ckpts.should_save(step, last=step == last):
                ckpts.save(step, state.state_dict())
            ckpts.poll()


if __name__ == "__main__":
    main()
