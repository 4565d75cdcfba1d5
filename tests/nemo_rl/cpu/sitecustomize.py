"""In every process of the environment, Ray's workers too: names of Python 3.12 that NeMo-RL and Gym import from typing."""

import sys

if sys.version_info < (3, 12):
    try:
        import typing

        import typing_extensions
    except ImportError:
        pass
    else:
        typing.TypedDict, typing.override = typing_extensions.TypedDict, typing_extensions.override
