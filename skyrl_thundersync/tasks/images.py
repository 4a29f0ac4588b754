"""Are the images there that rows name? Each is asked for once, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from skyrl_thundersync.process.check import Check
from skyrl_thundersync.sandbox.base import SandboxError
from skyrl_thundersync.sandbox.docker_engine import DockerEngine
from skyrl_thundersync.tasks.survey import NAMED, Places, Survey

NAME = "images of the tasks"
_GET_IT = "docker pull or build it; `skyrl data images` builds those of prepared tasks."


def images_there(backend: str, configured: str, surveys: Sequence[Survey]) -> Check:
    """Whether `backend` ("docker", "bubblewrap") has what every surveyed row asks for.

    configured: `thundersync.sandbox.image`, of rows that name none.
    """
    required = _joined([survey.images for survey in surveys])
    if backend != "docker":
        return Check(NAME, tuple(_without_images(backend, required)), "none needed")
    wanted = _joined([required, *(survey.optional_images for survey in surveys)])
    wanted.pop(None, None)
    try:
        missing = _missing([*wanted, configured])
    except SandboxError as error:
        return Check(NAME, (str(error),))
    problems = []
    for image in missing[:NAMED]:
        rows = f"{wanted[image].count} tasks: {wanted[image]}" if image in wanted else "thundersync.sandbox.image"
        problems.append(f"the Docker engine has no image {image!r}, named by {rows}. {_GET_IT}")
    if len(missing) > NAMED:
        problems.append(f"the Docker engine lacks {len(missing) - NAMED} more images that tasks name. {_GET_IT}")
    return Check(NAME, tuple(problems), f"{len(wanted)} named")


def _without_images(backend: str, required: Mapping[str | None, Places]) -> Iterator[str]:
    rows = Places()
    for places in required.values():
        rows.join(places)
    if rows.count:
        named = ", ".join(repr(image) for image in list(required)[:NAMED] if image)
        yield (
            f"{rows.count} tasks need an image{f' ({named})' if named else ''} or a working folder outside /workspace, and "
            f"{backend} has neither: {rows}. Set thundersync.sandbox.backend=docker, or take them out."
        )


def _joined(found: Sequence[Mapping[str | None, Places]]) -> dict[str | None, Places]:
    joined: dict[str | None, Places] = {}
    for images in found:
        for image, places in images.items():
            joined.setdefault(image, Places()).join(places)
    return joined


def _missing(images: Sequence[str]) -> list[str]:
    """Those that the engine lacks. One question for all that it has under the very name, one each for the others."""
    engine = DockerEngine()
    try:
        held = engine.names()
        return [image for image in dict.fromkeys(images) if image not in held and not engine.has_image(image)]
    finally:
        engine.close()
