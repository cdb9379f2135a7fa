"""`mla-convert` with FSDP2 on CPU processes, which accelerate otherwise turns into plain data parallelism."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from mla_convert import cli
from mla_convert.training.train_model import Student

_init, _forward = AcceleratorState.__init__, Student.forward


def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NPU  # any kind that may be FSDP
    _init(self, *args, **kwargs)


def forward(self: Student, *args: Any, **kwargs: Any) -> Any:
    inner = next(self.model.model.layers[0].self_attn.parameters())
    assert isinstance(inner, torch.distributed.tensor.DTensor), "not sharded"
    return _forward(self, *args, **kwargs)


AcceleratorState.__init__, Student.forward = init, forward

if __name__ == "__main__":
    cli.main()
