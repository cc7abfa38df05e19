"""Checks of kernels that copy pages, for any device."""

from __future__ import annotations

import torch

from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes

CPU = torch.device("cpu")

# dtype, page size, KV heads of each layer
CASES = [
    (torch.bfloat16, 16, (2, 2)),
    (torch.float32, 1, (1, 3)),
    (torch.float8_e4m3fn, 4, (3,)),
]


def planes_of(dtype: torch.dtype, page_size: int, heads: tuple[int, ...]) -> list[torch.Tensor]:
    """Keys and values of layers with these numbers of heads, of random bytes."""
    shapes = [(9, page_size, num, 8 * num) for num in heads for _ in "kv"]
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (*shape[:3], shape[3] * dtype.itemsize), generator=random)
        .to(torch.uint8)
        .view(dtype)
        for shape in shapes
    ]


def check_round_trip(device: torch.device, planes: list[torch.Tensor]) -> None:
    """Pages of planes that have moved travel through a packed buffer to other pages, and no other
    byte changes."""
    pages, targets = [7, 1, 4], [2, 8, 3]
    copies = [torch.zeros_like(plane, device=device) for plane in planes]
    there, in_their_places = Planes.of(copies), []
    for copy, plane in zip(copies, planes, strict=True):
        num_bytes = copy.nbytes
        copy.untyped_storage().resize_(0)
        in_their_places.append(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        copy.untyped_storage().resize_(num_bytes)
        copy.copy_(plane)
    there.find()
    packed = torch.full((5, there.page_bytes), 77, dtype=torch.uint8, device=device)
    gather_pages(there, torch.tensor(pages, device=device), packed)
    for row, page in enumerate(pages):
        whole = torch.cat([plane[page].flatten().view(torch.uint8) for plane in planes])
        assert torch.equal(packed[row].cpu(), whole)
    assert (packed[len(pages) :] == 77).all()
    scatter_pages(there, torch.tensor(targets, device=device), packed)
    for plane, words in zip(planes, there.words, strict=True):
        expected = plane.view(torch.uint8).clone()
        expected[targets] = expected[pages]
        assert torch.equal(words.cpu().view(torch.uint8).flatten(), expected.flatten())
