"""States of torch in files of DCP. Needs no megatron-core."""

from ckptfsm.adapters.versions import require

require("torch", extra="torch")
