import pytest
from plain import save_model


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(family) → the saved tiny model of that family."""
    made = {}

    def get(family: str, **overrides) -> str:
        key = (family, tuple(sorted(overrides.items())))
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return get
