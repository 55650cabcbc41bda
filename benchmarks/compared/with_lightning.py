"""Lightning: its trainer with ModelCheckpoint."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from training import EVERY, KEPT, arguments, batch, make, tell


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self._optimizer = make()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def training_step(self, _: torch.Tensor, __: int) -> torch.Tensor:
        x = batch(self.global_step + 1)  # a plain loader begins anew after a restart
        loss: torch.Tensor = (self.model(x) - x).square().mean()
        tell(self.global_step + 1, loss.item())
        return loss


def main() -> None:
    root, last = arguments()
    kept = ModelCheckpoint(
        dirpath=root,
        every_n_train_steps=EVERY,
        save_top_k=KEPT,
        monitor="step",
        mode="max",
        save_last="link",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=last,
        callbacks=[kept],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(10_000)), ckpt_path="last")


if __name__ == "__main__":
    main()
