"""The trainer's side of weight transfer. Where vLLM broadcasts over NCCL, bytes go over a socket; as with NCCL, both
sides wait for each other, and nobody ends that wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    def metadata(self) -> list[ParamMeta]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(init_info: Any, *, client: Any, source: WeightSource) -> _Trainer:
        assert init_info.rank == 0
        return _Trainer(init_info, client, source)


class _Trainer:
    def __init__(self, init_info: Any, client: Any, source: WeightSource) -> None:
        self._client, self._source, self._buffer_bytes = client, source, init_info.packed_buffer_size_bytes
        theirs = {name: value for name, value in asdict(init_info).items() if name != "rank"} | {"rank_offset": 1}
        with socket.create_server((init_info.master_address, init_info.master_port)) as listener:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(client.init_weight_transfer_engine, theirs)
                self._socket, _ = listener.accept()
                asked.result()

    def send_weights(self) -> None:
        declared = self._source.metadata()
        info = {
            "names": [each.name for each in declared],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in declared],
            "shapes": [list(each.shape) for each in declared],
        }
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._client.update_weights, info)
            for each, (name, value) in zip(declared, self._source, strict=True):
                assert (each.name, each.dtype, each.shape) == (name, value.dtype, tuple(value.shape)), name
                self._socket.sendall(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
            asked.result()
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        self._socket.close()
