"""`skyrl train` where the files of each publication but the first hold the weights of the first."""

import shutil
from pathlib import Path

from skyrl_thundersync.hosts.skyrl.entrypoint import main
from skyrl_thundersync.hosts.skyrl.experiment import ThunderSyncExperiment


class OldWeights(ThunderSyncExperiment):
    def get_inference_client(self):
        hook = super().get_inference_client()
        target, first = self._cluster._target, Path(self.cfg.thundersync.run_dir) / "first"
        load = target.load_weights

        async def load_old(path, version, probe_ids):
            if version == 0:
                shutil.copytree(path, first)
            else:
                for file in first.glob("*.safetensors"):
                    shutil.copy2(file, path)
            return await load(path, version, probe_ids)

        target.load_weights = load_old
        return hook


if __name__ == "__main__":
    main("tests.wrong_weights:OldWeights")
