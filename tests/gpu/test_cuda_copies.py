"""cudaMemcpyBatchAsync itself: bytes, stream order, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from odc_kernels.batch_copy import Batch, torchs_batch_copy
from tests.gpu.marks import MARKS

pytestmark = MARKS


@pytest.mark.parametrize("near", [0, 2, 5])
def test_a_batch(near: int) -> None:
    if (copy := torchs_batch_copy()) is None:
        pytest.skip(f"torch's CUDA is {torch.version.cuda}, or the driver is older than 12.8")
    sources = [torch.empty(count, device="cuda", dtype=torch.uint8) for count in (1, 7, 4096, 2**20, 3 * 2**20 + 1)]
    out = torch.zeros(sum(rows.nbytes for rows in sources), device="cuda", dtype=torch.uint8)
    ends = torch.tensor([rows.nbytes for rows in sources]).cumsum(0).tolist()
    segments = [(end - rows.nbytes, rows) for end, rows in zip(ends, sources, strict=True)]
    batch = Batch.of(segments, near=near)
    stream = torch.cuda.Stream()
    torch.cuda._sleep(10**8)
    for rows in sources:
        rows.random_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy(batch, out.data_ptr())
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, torch.cat(sources))
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync: invalid argument"):
        copy(batch, out.data_ptr())  # on the default stream
    assert torch.equal(out + 0, torch.cat(sources)), "torch's next launch does not find that error"
