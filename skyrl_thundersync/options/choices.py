"""The values that text options may have. Unknown ones are refused with the nearest right one when options are read."""

from skyrl_thundersync.options.registry import MODULE_CLASS, offered
from skyrl_thundersync.options.schema import ADVANTAGE_LAWS, OBJECTIVE_POINTS, OBJECTIVES
from skyrl_thundersync.stream.release import SCHEDULES

DTYPES = ("bfloat16", "float32")

CHOICES = {
    "thundersync.objective": (*OBJECTIVES, *offered(OBJECTIVE_POINTS), MODULE_CLASS),
    "thundersync.schedule": SCHEDULES,
    "thundersync.rollout": ("auto", "servers", "replicas"),
    "thundersync.device": ("auto", "cpu", "cuda"),
    "thundersync.learner.dtype": DTYPES,
    "thundersync.learner.accumulator": ("fp32", "exact"),
    "thundersync.teacher.backend": ("vllm", "transformers"),
    "thundersync.teacher.dtype": DTYPES,
    "thundersync.grpo.law": ADVANTAGE_LAWS,
    "thundersync.sandbox.backend": ("auto", "docker", "bubblewrap"),
    "generator.inference_engine.backend": ("vllm",),
    "generator.inference_engine.model_dtype": DTYPES,
    "generator.inference_engine.distributed_executor_backend": ("mp", "ray"),
    "trainer.logger": ("wandb", "mlflow", "swanlab", "tensorboard", "console"),
    "trainer.resume_mode": ("none", "latest", "from_path"),
    "trainer.strategy": ("fsdp",),
}
