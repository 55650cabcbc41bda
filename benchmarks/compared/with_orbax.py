"""Orbax, under JAX: its manager, with asynchronous saves."""

from __future__ import annotations

import jax
import orbax.checkpoint as ocp
from training import EVERY, KEPT, WIDTH, arguments, batch, tell


def update(state: dict[str, jax.Array], step: int) -> dict[str, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return ((x @ w - x) ** 2).mean()

    x = jax.numpy.asarray(batch(step).numpy())
    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    tell(step, float(loss))
    m = 0.9 * state["m"] + grad
    v = 0.99 * state["v"] + grad**2
    return {"w": state["w"] - 1e-3 * m / (v**0.5 + 1e-8), "m": m, "v": v}


def main() -> None:
    root, last = arguments()
    state = {name: jax.numpy.zeros((WIDTH, WIDTH)) for name in "wmv"}
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, save_interval_steps=EVERY)
    with ocp.CheckpointManager(root, options=options) as ckpts:
        begun = ckpts.latest_step()
        if begun is not None:
            state = ckpts.restore(begun, args=ocp.args.StandardRestore(state))
        for step in range((begun or 0) + 1, last + 1):
            state = update(state, step)
            ckpts.save(step, args=ocp.args.StandardSave(state), force=step == last)
        ckpts.wait_until_finished()


if __name__ == "__main__":
    main()
