"""The arguments."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

_HELD: dict[str, Namespace] = {}


def get_args() -> Namespace:
    return _HELD["args"]


def set_args(**values: Any) -> Namespace:
    defaults = {
        "save": None,
        "load": None,
        "save_interval": 2,
        "save_retain_interval": None,
        "train_iters": 6,
        "async_save": True,
        "use_dist_ckpt": True,
        "ckpt_format": "torch_dist",
        "non_persistent_save_interval": None,
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
        "pace_s": 0.002,
        "save_tokenizer_assets": False,
        "tokenizer_type": "NullTokenizer",
    }
    _HELD["args"] = Namespace(**{**defaults, **values})
    return _HELD["args"]
