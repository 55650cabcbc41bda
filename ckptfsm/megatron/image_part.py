"""A torch_dist part as images: its shards, the state common to all ranks, the planned metadata."""

from __future__ import annotations

from torch.utils._pytree import tree_map

from ckptfsm.adapters.notices import no_warning_is_an_error
from ckptfsm.core.images import Literal, image_of
from ckptfsm.core.layout import PLANNED, join, planned_name
from ckptfsm.core.parts import PartSpec
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.images import Held, saved, shards_of, to_host
from ckptfsm.disk.stock import COMMON, COMMON_KEY
from ckptfsm.megatron.planning import PartDraft
from ckptfsm.writers.image import ImagePart


@no_warning_is_an_error()
def stage_images(
    spec: PartSpec,
    draft: PartDraft,
    rank: int,
    planned: bytes | None,
    *,
    common_in_shard: bool,
    templates: Templates,
    held: Held,
) -> ImagePart:
    """The share of ``rank`` in a part, on which all ranks agreed.

    ``planned`` is None except on the part's first rank, which writes the state common to all ranks.
    """
    templates.look()
    images, rows = shards_of(rank, spec.directory, draft.buckets, templates, held)
    if planned is not None:
        file = f"__{rank}_{len(draft.buckets)}.distcp" if common_in_shard else COMMON
        common_state = tree_map(to_host, draft.common)
        common = saved([common_state] if common_in_shard else common_state)
        images.append(image_of(join(spec.directory, file), [Literal(common)]))
        if common_in_shard:
            rows.append((COMMON_KEY, None, None, file, 0, len(common)))
        images.append(image_of(planned_name(spec.name), [Literal(planned)]))
    made = (PLANNED,) if planned is not None else ()
    return ImagePart(
        spec.name,
        spec.directory,
        tuple(images),
        tuple(rows),
        made,
        owner=tuple(held.copies),
        copying=held.device,
    )
