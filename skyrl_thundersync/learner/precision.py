"""FP64 throughout: Transformers runs norms, routers and rotary angles in FP32 whatever the model's dtype.

That is right for training and too coarse for proving a gradient exact: two orders of one sum differ by 1e-8. Within
`all_double()` every request for FP32 becomes one for FP64, so an FP64 student really is one.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class all_double(TorchFunctionMode):
    """Context in which torch calls that ask for float32 get float64; backwards follow their forward."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)
