"""SkyRL's dataset over the rows that were checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.train.dataset import PromptDataset

from skyrl_thundersync.tasks.rows import is_hub_name, read_rows
from skyrl_thundersync.tasks.survey import RowChecks


class TaskDataset(PromptDataset):
    """`PromptDataset` that reads task files as the checks do.

    SkyRL hands files to `datasets`, which infers one schema for all rows: columns that appear late, texts beside numbers and
    half surrogate pairs end a run there, and a row gets the paths of all rows' files. Data sets of the hub are read as
    SkyRL reads them, and checked then.
    """

    def __init__(self, sources: list[str], env_class: str, tokenizer: Any, max_prompt_length: int) -> None:
        """`env_class`: of rows that name none. Raises ValueError when a row cannot be run, or none is left."""
        self._env_class = env_class
        super().__init__(sources, tokenizer, max_prompt_length)
        if not self.dataframe:
            raise ValueError(
                f"no task left in {', '.join(sources)}: the files are empty, or every prompt is longer than "
                f"trainer.max_prompt_length={max_prompt_length} tokens"
            )

    def _read_files_and_tokenize(self) -> None:
        rows = [row for source in self.datasets for row in self._read(source)]
        self.dataframe = _Rows(row for row in rows if self._fits(row["prompt"]))

    def _read(self, source: str) -> list[dict[str, Any]]:
        if not is_hub_name(source):
            return [row for _, row in read_rows(Path(source).expanduser())]
        import datasets

        name, _, split = source.partition(":")
        rows = datasets.load_dataset(name, split=split or "train", keep_in_memory=True).to_list()
        checks = RowChecks(self._env_class)
        for number, row in enumerate(rows, 1):
            if problems := checks.check(row, trained=True)[1]:
                raise ValueError(
                    f"{source}, row {number}: {'; '.join(f'`{field}` {said}' for field, said in problems)}"
                )
        return rows

    def _fits(self, prompt: list[dict[str, Any]]) -> bool:
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, tokenize=True)
        return len(ids) <= self.max_prompt_length


class _Rows(list):
    """Whoever asks for a row may take it apart."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(super().__getitem__(index))
