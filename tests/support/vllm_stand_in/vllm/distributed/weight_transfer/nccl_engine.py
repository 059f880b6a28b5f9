from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)
    packed: bool = True
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2
