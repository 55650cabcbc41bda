"""torch.distributed.checkpoint: it saves and loads one directory, and the rest is the trainer's."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import EVERY, KEPT, arguments, make, update


def main() -> None:
    root, last = arguments()
    model, optimizer = make()
    saved = sorted(int(p.parent.name) for p in Path(root).glob("*/.metadata"))
    begun = saved[-1] if saved else 0
    if saved:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{root}/{begun}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    future, place = None, ""
    for step in range(begun + 1, last + 1):
        update(model, optimizer, step)
        if step % EVERY == 0 or step == last:
            if future is not None:
                future.result()
                saved.append(int(Path(place).name))
                for old in saved[:-KEPT]:
                    shutil.rmtree(f"{root}/{old}")
                del saved[:-KEPT]
            place = f"{root}/{step}"
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            future = dcp.async_save(state, checkpoint_id=place)
    if future is not None:
        future.result()


if __name__ == "__main__":
    main()
