"""Routes that profile the engine, under vLLM's and SGLang's names: `/start_profile` and `/stop_profile`.

Owns what may be asked for; whether it can be done now is the engine's to say.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError, UnavailableError
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.fields import NullOrFalse, NullOrNoList, NullOrNoText, NullOrZero, described, refuse_asking
from jaxserve.server.server_state import Serving

# Of SGLang's fields, those that mean nothing here, and why.
_REFUSED = {
    "start_step": "a profile starts with the next step",
    "record_shapes": "every program has fixed shapes, and the trace names the programs",
    "profile_by_stage": "every profile tells prefill and decode apart, by their programs",
    "profile_stages": "every profile tells prefill and decode apart, by their programs",
    "profile_prefix": "a profile's folder is named by its time; output_dir may choose the folder above it",
    "merge_profiles": "one process drives all devices, and writes one profile",
}
_ACTIVITIES = frozenset({"CPU", "GPU"})
_BOTH = {
    "type": "array",
    "items": {"enum": sorted(_ACTIVITIES)},
    "allOf": [{"contains": {"const": name}} for name in sorted(_ACTIVITIES)],
}


class _Generation(msgspec.Struct):
    """A completion or a chat, by the fields that one of them must have."""

    model: str
    prompt: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET


class _ProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    @staticmethod
    def meant(body: bytes) -> bytes:
        """An empty object for no body; and for a generation's, which `vllm bench serve --profile` sends to both routes
        for no other reason than that it has no other way to post."""
        try:
            sent = msgspec.json.decode(body or b"{}", type=_Generation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body or b"{}"
        return body if sent.prompt is sent.messages is msgspec.UNSET else b"{}"


class StartProfileRequest(_ProfileRequest, kw_only=True, forbid_unknown_fields=True):
    """What to record. `output_dir` is a folder within `--profile-dir`; after `num_steps` steps the profile ends by
    itself. `with_stack` adds Python's calls. `activities` are always the host's and the device's."""

    output_dir: Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00]*$")] | None = None
    num_steps: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    with_stack: bool | None = None
    activities: Annotated[list[str], described(_BOTH)] | None = None

    start_step: NullOrZero = None
    record_shapes: NullOrFalse = None
    profile_by_stage: NullOrFalse = None
    profile_stages: NullOrNoList = None
    profile_prefix: NullOrNoText = None
    merge_profiles: NullOrFalse = None


class StopProfileRequest(_ProfileRequest, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to say."""


class Profile(msgspec.Struct):
    """The folder of the profile's files, and how many steps are in it."""

    output_dir: str
    num_steps: int


async def start_profile(serving: Serving, exchange: Exchange, request: StartProfileRequest) -> None:
    """Record from the next step on; answers once it does."""
    for name, why in _REFUSED.items():
        if getattr(request, name):
            raise InvalidRequestError(f"{name} is not supported: {why}", param=name)
    refuse_asking(request)
    if request.activities is not None and set(request.activities) != _ACTIVITIES:
        raise InvalidRequestError(
            f"activities must be {sorted(_ACTIVITIES)}, got {request.activities}: host and device are always recorded",
            param="activities",
        )
    try:
        profile = await serving.require().engine.start_profile(
            request.output_dir, num_steps=request.num_steps, with_stack=bool(request.with_stack)
        )
    except TimeoutError as error:
        raise UnavailableError("The engine has not answered in time; a step may take very long") from error
    except InvalidRequestError as error:
        raise _not_now(error) from error
    await exchange.respond(Profile(profile.directory, profile.num_steps))


async def stop_profile(serving: Serving, exchange: Exchange, request: StopProfileRequest) -> None:
    """End the profile; answers once its files are written. Requests go on meanwhile."""
    try:
        profile = await serving.require().engine.stop_profile()
    except TimeoutError as error:
        raise UnavailableError("The profile is still being written; the server's log will say when it is") from error
    except InvalidRequestError as error:
        raise _not_now(error) from error
    await exchange.respond(Profile(profile.directory, profile.num_steps))


def _not_now(error: InvalidRequestError) -> Exception:
    """409 where no field is at fault, but what the engine does or has no room for."""
    return error if error.param is not None else HttpError(409, str(error), code="conflict")
