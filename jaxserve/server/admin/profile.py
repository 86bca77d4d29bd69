"""Routes that profile the engine, under vLLM's and SGLang's names: `/start_profile` and `/stop_profile`.

Owns which options are accepted; the engine decides whether it can start a profile now.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError, UnavailableError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import (
    NullOrEmptyList,
    NullOrEmptyText,
    NullOrFalse,
    NullOrZero,
    explicit_schema,
    refuse_unsupported_fields,
)
from jaxserve.server.server_state import ServerState

# SGLang's fields without a meaning here, with the reason.
_UNSUPPORTED = {
    "start_step": "a profile starts with the next step",
    "record_shapes": "every program has fixed shapes, and the trace names the programs",
    "profile_by_stage": "every profile tells prefill and decode apart, by their programs",
    "profile_stages": "every profile tells prefill and decode apart, by their programs",
    "profile_prefix": "a profile's folder is named by its time; output_dir may choose the folder above it",
    "merge_profiles": "one process drives all devices, and writes one profile",
}
_ACTIVITIES = frozenset({"CPU", "GPU"})
_ACTIVITIES_SCHEMA = {
    "type": "array",
    "items": {"enum": sorted(_ACTIVITIES)},
    "allOf": [{"contains": {"const": name}} for name in sorted(_ACTIVITIES)],
}


class _GenerationBody(msgspec.Struct):
    """The required fields of a completion and of a chat."""

    model: str
    prompt: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET


class _ProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    @staticmethod
    def preprocess_body(body: bytes) -> bytes:
        """Return `{}` instead of an empty body, or of a completion's or chat's body, which `vllm bench serve --profile`
        sends to both routes because it can't post anything else."""
        try:
            sent = msgspec.json.decode(body or b"{}", type=_GenerationBody)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body or b"{}"
        return body if sent.prompt is sent.messages is msgspec.UNSET else b"{}"


class StartProfileRequest(_ProfileRequest, kw_only=True, forbid_unknown_fields=True):
    """The profile to record. `output_dir` is a folder within `--profile-dir`; the profile ends by itself after
    `num_steps` steps. `with_stack` adds Python's calls. `activities` must name both host and device."""

    output_dir: Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00]*$")] | None = None
    num_steps: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    with_stack: bool | None = None
    activities: Annotated[list[str], explicit_schema(_ACTIVITIES_SCHEMA)] | None = None

    start_step: NullOrZero = None
    record_shapes: NullOrFalse = None
    profile_by_stage: NullOrFalse = None
    profile_stages: NullOrEmptyList = None
    profile_prefix: NullOrEmptyText = None
    merge_profiles: NullOrFalse = None


class StopProfileRequest(_ProfileRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/stop_profile`: an empty object."""


class ProfileResponse(msgspec.Struct):
    """The folder of the profile's files, and the number of recorded steps."""

    output_dir: str
    num_steps: int


async def start_profile(state: ServerState, exchange: HttpExchange, request: StartProfileRequest) -> None:
    """Record from the next step on; answer once recording has started."""
    for name, why in _UNSUPPORTED.items():
        if getattr(request, name):
            raise InvalidRequestError(f"{name} is not supported: {why}", param=name)
    refuse_unsupported_fields(request)
    if request.activities is not None and set(request.activities) != _ACTIVITIES:
        raise InvalidRequestError(
            f"activities must be {sorted(_ACTIVITIES)}, got {request.activities}: host and device are always recorded",
            param="activities",
        )
    try:
        profile = await state.require_loaded().engine.start_profile(
            request.output_dir, num_steps=request.num_steps, with_stack=bool(request.with_stack)
        )
    except TimeoutError as error:
        raise UnavailableError("The engine has not answered in time; a step may take very long") from error
    except InvalidRequestError as error:
        raise _as_conflict(error) from error
    await exchange.respond(ProfileResponse(profile.directory, profile.num_steps))


async def stop_profile(state: ServerState, exchange: HttpExchange, request: StopProfileRequest) -> None:
    """End the profile; answer once its files are written. Requests continue meanwhile."""
    try:
        profile = await state.require_loaded().engine.stop_profile()
    except TimeoutError as error:
        raise UnavailableError("The profile is still being written; the server's log will say when it is") from error
    except InvalidRequestError as error:
        raise _as_conflict(error) from error
    await exchange.respond(ProfileResponse(profile.directory, profile.num_steps))


def _as_conflict(error: InvalidRequestError) -> Exception:
    """Return a 409 if no field is at fault, but the engine's state."""
    return error if error.param is not None else HttpError(409, str(error), code="conflict")
