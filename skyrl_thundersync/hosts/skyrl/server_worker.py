"""The worker extension of SkyRL's inference servers, with this plugin's: vLLM takes one."""

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

from skyrl_thundersync.engines.weight_worker import WeightWorker


class ServerWorker(WeightWorker, NewInferenceWorkerWrap):
    """SkyRL's own, and what proves the weights."""
