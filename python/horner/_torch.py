"""The library runs only with the torch that it was built with. Imports nothing heavy: the command uses this too."""

import os


def check(version: str) -> None:
    """Raises ImportError unless this is the version of torch that the library was built with."""
    with open(os.path.join(os.path.dirname(__file__), "built-with-torch")) as file:
        built = file.read()
    if str(version) != built:
        raise ImportError(
            f"horner was built with torch {built}, but torch {version} is installed, and torch's classes change from "
            "release to release. Build horner again in its source folder: pip install --force-reinstall --no-deps . "
            f"(or make build); or install torch=={built}"
        )
