"""What this plugin relies on in DeepSpeed's ZeRO optimizer and DeepSpeed does not promise (docs/seams.md).

Two processes over gloo, each with a list of five parameters of odd sizes; gradients never come from DeepSpeed's backward.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

SIZES = (7, 33, 129, 5, 64)
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
rank, stage, dtype, offload = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4] == "offload"
dist.init_process_group("gloo", init_method="file://" + sys.argv[5], rank=rank, world_size=2)
import deepspeed
known = "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
values = [torch.randn(n) for n in SIZES]
model = torch.nn.ParameterList(torch.nn.Parameter(v.clone().to(dtype)) for v in values)
adam = torch.optim.AdamW(model, lr=1e-2, fused=True)
zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {"compute_grad_norm": False})
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero,
          "bf16": {"enabled": dtype is torch.bfloat16}, "zero_force_ds_cpu_optimizer": False}
_, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
flat, size = optimizer.bit16_groups_flat[0], int(optimizer.partition_size[0])
names = {id(p): i for i, p in enumerate(model)}
order = [names[id(p)] for p in optimizer.round_robin_bit16_groups[0]]
offsets = list(optimizer.round_robin_bit16_offsets[0])
inside = all(flat.data_ptr() <= p.data_ptr() < flat.data_ptr() + flat.nbytes for p in model)
whole = torch.zeros(flat.numel())
for index, offset in zip(order, offsets):
    whole[offset:offset + SIZES[index]] = torch.arange(SIZES[index]) / 100 + index
shard = whole[rank * size:(rank + 1) * size]
master = optimizer.single_partition_of_fp32_groups[0]
if offload:
    master.grad.copy_(shard)
else:
    optimizer.averaged_gradients[0] = [shard]
optimizer.step()
state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[0]]
print(json.dumps({
    "known_op": known, "inside": inside, "order": order, "offsets": offsets, "flat": flat.numel(), "size": size,
    "own_adam": type(optimizer.optimizer).__name__, "state": sorted(state), "moments": list(state["exp_avg"].shape),
    "parameters": [p.detach().float().tolist() for p in model],
}))
"""


def run(tmp_path, stage: int, dtype: str, offload: str) -> list[dict]:
    script = tmp_path / "rank.py"
    script.write_text(f"SIZES = {SIZES}\n{SCRIPT}")
    command = [sys.executable, str(script)]
    args = [str(stage), dtype, offload, str(tmp_path / "meet")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        for rank in (0, 1)
    ]
    outs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outs]


@pytest.mark.parametrize(
    "stage, dtype, offload",
    [(1, "float32", "device"), (2, "bfloat16", "device"), (1, "bfloat16", "offload")],
)
def test_gradients_put_into_a_shard_make_one_step_of_torchs_adam(tmp_path, stage, dtype, offload):
    ranks = run(tmp_path, stage, dtype, offload)
    for facts in ranks:
        assert facts["known_op"]  # the switch that keeps its shared-memory collectives from being compiled
        assert facts["inside"], "parameters live in the flat buffer"
        assert facts["flat"] == 2 * facts["size"]
        assert sorted(facts["order"]) == list(range(len(SIZES)))
        assert facts["own_adam"] == "AdamW"
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(facts["state"])
        assert facts["moments"] == [facts["size"]]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]

    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(n).to(getattr(torch, dtype)).float()) for n in SIZES]
    adam = torch.optim.AdamW(plain, lr=1e-2)
    for index, p in enumerate(plain):
        p.grad = torch.arange(SIZES[index]) / 100 + index
    adam.step()
    for p, found in zip(plain, ranks[0]["parameters"], strict=True):
        expected = p.detach().to(getattr(torch, dtype)).float()
        assert torch.allclose(expected, torch.tensor(found), rtol=1e-6, atol=1e-7)
