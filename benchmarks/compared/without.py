"""No checkpoints: what the lines of the others are counted from."""

from __future__ import annotations

from training import arguments, make, update


def main() -> None:
    _, last = arguments()
    model, optimizer = make()
    for step in range(1, last + 1):
        update(model, optimizer, step)


if __name__ == "__main__":
    main()
