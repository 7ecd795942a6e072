"""Tokenizers by path: the one home of the `tokenizers` library, and of chat templates.

A tokenizer is loaded once per digest, whoever asks: models of one family share it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sie_stream.errors import ConfigError, InvalidRequest


class TemplateRefusal(TemplateError):
    """A chat template called raise_exception()."""


class LoadedTokenizer:
    """Implements processors.tokenise.TextEncoder, and detokenises for Stage 2. May be shared between threads.

    Truncation is kept where tokenizer.json asks for it (embedders that cut long texts); padding belongs to engines.
    """

    def __init__(self, tokenizer: Tokenizer, digest: str, template: ChatTemplate | None) -> None:
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.digest = digest
        self.separators = safe_separators(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequest(
                "bad_messages",
                "the model has no chat template; send `prompt` instead of `messages`.",
                "inputs.messages",
            )
        return self._template.render(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


class ChatTemplate:
    """A Jinja chat template in a sandbox: it sees the messages and the special tokens, and nothing else."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises InvalidRequest (`bad_messages`)."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(
                "bad_messages", f"the model's chat template refuses the messages: {error}", "inputs.messages"
            ) from error


class TokenizerStore:
    """Every tokenizer of the process, by digest."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedTokenizer] = {}

    def get(self, path: str, digest: str = "") -> LoadedTokenizer:
        """The tokenizer at `path` (tokenizer.json, or its folder). `digest`: sha256 of tokenizer.json, checked.

        Raises ConfigError when the file is missing, unreadable, or has another digest.
        """
        wanted = digest.removeprefix("sha256:")
        if wanted and wanted in self._loaded:
            return self._loaded[wanted]
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"tokenizer {str(file)!r} cannot be read: {error.strerror}") from error
        found = hashlib.sha256(content).hexdigest()
        if wanted and found != wanted:
            raise ConfigError(f"tokenizer {str(file)!r} has sha256 {found}, the route says {wanted}")
        if found not in self._loaded:
            self._loaded[found] = load_tokenizer(file, content, found)
        return self._loaded[found]


@functools.cache
def shared_tokenizers() -> TokenizerStore:
    """One store for all of a process that need the same tokenizers."""
    return TokenizerStore()


def load_tokenizer(file: Path, content: bytes, digest: str) -> LoadedTokenizer:
    """A tokenizer from the bytes of its tokenizer.json; the chat template is looked for beside it."""
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ConfigError(f"tokenizer {str(file)!r} is not a tokenizer.json: {error}") from error
    return LoadedTokenizer(tokenizer, digest, _find_template(file))


def safe_separators(tokenizer: Tokenizer) -> dict[str, int]:
    """Added tokens that cut a text into pieces which tokenise independently; empty when that cannot be promised.

    The library takes un-normalised added tokens out of the raw text first and treats each remaining piece alone. Not
    independent are pieces next to tokens that swallow blanks or ask for word boundaries, and pieces of a
    pre-tokenizer that treats the start of the whole text differently (Metaspace with prepend_scheme `first`), and
    nothing is where long texts are cut.
    """
    before = tokenizer.pre_tokenizer
    # Its state alone is JSON; that of the whole tokenizer would take as long to write and read as loading it.
    rules = None if before is None else json.loads(before.__getstate__())
    if tokenizer.truncation or "first" in _values_of(rules, "prepend_scheme"):
        return {}
    added = tokenizer.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return {}
    return {token.content: number for number, token in sorted(added.items()) if not token.normalized and token.content}


def _values_of(node: Any, name: str) -> list[Any]:
    """All values of the key `name` anywhere in a JSON document."""
    if isinstance(node, dict):
        own = [node[name]] if name in node else []
        return own + [value for child in node.values() for value in _values_of(child, name)]
    if isinstance(node, list):
        return [value for child in node for value in _values_of(child, name)]
    return []


def _find_template(file: Path) -> ChatTemplate | None:
    config_file = file.with_name("tokenizer_config.json")
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    template_file = file.with_name("chat_template.jinja")
    source = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    if not source:
        return None
    try:
        return ChatTemplate(source, _special_tokens(config))
    except TemplateError as error:
        raise ConfigError(f"chat template beside {str(file)!r}: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
