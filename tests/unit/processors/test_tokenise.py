"""Cached tokens are the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from processors.tokenise import (
    CHARS_PER_TOKEN_MAX,
    ChatMessage,
    TextInputs,
    TokenCache,
    Tokeniser,
    check_context,
    check_length,
    text_tokens,
)
from sie_stream.edge.tokenizer import LoadedTokenizer, TokenizerStore, safe_separators
from sie_stream.errors import ConfigError, InvalidRequest
from tests.unit.processors.kit import Encoders, body, machine, record, route, take_up

CORPUS = ["the quick brown fox jumps over the lazy dog", "système user assistant", "hello world hello fox", "1 2 3 4"]
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(**special: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_special_tokens([AddedToken(START, **special), AddedToken(END, **special)])
    return made


def word_piece() -> Tokenizer:
    """As BERT has it: lower case, [CLS] and [SEP] around a text."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    made.train_from_iterator(CORPUS * 3, trainer)
    made.post_processor = processors.BertProcessing(
        ("[SEP]", made.token_to_id("[SEP]")), ("[CLS]", made.token_to_id("[CLS]"))
    )
    return made


BYTE_LEVEL, WORD_PIECE = byte_level(), word_piece()
PIECES = st.sampled_from(
    [START, END, "<|im_", "start|>", " ", "\n", "hello", "fox ", "[SEP]", "[CLS]", "é", "the q", ""]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=12).map("".join)


def loaded(tokenizer: Tokenizer) -> LoadedTokenizer:
    return LoadedTokenizer(tokenizer, "d", None)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WORD_PIECE], ids=["byte level", "word piece"])
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_pieces_cached_apart_give_the_tokens_of_the_whole(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoder = loaded(tokenizer)
    tokeniser = Tokeniser(encoder, TokenCache(tokens_max=200))  # small, so that entries are also thrown out
    assert encoder.separators
    for text in [*texts, *texts]:
        assert list(tokeniser.rendered(text)) == encoder.encode_plain(text)
        assert list(tokeniser.text(text)) == encoder.encode(text)


def test_the_start_of_a_chat_comes_from_the_cache() -> None:
    cache = TokenCache()
    tokeniser = Tokeniser(loaded(BYTE_LEVEL), cache)
    head = f"{START}system\n{'the quick brown fox ' * 50}{END}\n"
    tokeniser.rendered(f"{head}{START}user\nhello{END}\n")
    made = cache.counts.tokens_made
    tokeniser.rendered(f"{head}{START}user\nlazy dog{END}\n")
    assert cache.counts.tokens_made - made < 20
    assert cache.counts.tokens_reused > 200


def test_the_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    cache = TokenCache(tokens_max=100)
    for number in range(50):
        cache.put(("d", "text", f"t{number}"), (1, 2, 3))
        cache.get(("d", "text", "t0"))
    assert len(cache) <= 10
    assert cache.get(("d", "text", "t0")) is not None
    assert cache.get(("d", "text", "t1")) is None


@pytest.mark.parametrize("swallows", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_at_their_neighbours_are_no_place_to_cut(swallows: str) -> None:
    assert safe_separators(byte_level(**{swallows: True})) == {}


def test_truncation_and_first_piece_rules_forbid_cutting() -> None:
    cut = byte_level()
    cut.enable_truncation(16)
    metaspace = byte_level()
    metaspace.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])
    assert safe_separators(cut) == safe_separators(metaspace) == {}
    encoder = loaded(cut)
    long = "hello world " * 50
    assert len(Tokeniser(encoder, TokenCache()).rendered(long)) == 16


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    return tmp_path


def test_one_tokenizer_per_digest(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "tokenizer.json"
    other.write_bytes((folder / "tokenizer.json").read_bytes())
    store = TokenizerStore()
    first = store.get(str(folder))
    assert store.get(str(other)) is first
    assert store.get("gone", f"sha256:{first.digest}") is first
    with pytest.raises(ConfigError, match="the route says 00"):
        store.get(str(other), "00")


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenizerStore().get(str(tmp_path / "none.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        TokenizerStore().get(str(tmp_path))


def test_chats_are_rendered_by_the_template(folder: Path) -> None:
    encoder = TokenizerStore().get(str(folder))
    text = encoder.render_chat([{"role": "user", "content": "hello"}])
    assert text == f"{START}user\nhello{END}\n{START}assistant\n"
    ids = Tokeniser(encoder, TokenCache()).chat([{"role": "user", "content": "hello"}])
    assert list(ids) == encoder.encode_plain(text)
    assert encoder.decode(ids) == "user\nhello\nassistant\n"


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1/0 if false else messages[0].content + 1 }}",
    ],
)
def test_a_template_can_only_refuse(folder: Path, template: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest) as refusal:
        TokenizerStore().get(str(folder)).render_chat([{"role": "robot", "content": "hello"}])
    assert (refusal.value.code, refusal.value.field) == ("bad_messages", "inputs.messages")


def test_context_leaves_room_for_an_answer() -> None:
    check_context((1,) * 9, 10, True, "inputs.prompt")
    check_context((1,) * 10, 10, False, "inputs.text")
    check_context((1,) * 99, 0, True, "inputs.prompt")
    for size, generates in ((10, True), (11, False)):
        with pytest.raises(InvalidRequest) as refusal:
            check_context((1,) * size, 10, generates, "inputs.prompt")
        assert refusal.value.code == "context_too_long"


@pytest.mark.parametrize("kind", ["prompt", "text", "messages"])
def test_what_cannot_fit_is_refused_by_its_length(kind: str) -> None:
    def inputs(size: int) -> TextInputs:
        halves = ("a" * (size // 2), "a" * (size - size // 2))
        if kind == "messages":
            return TextInputs(messages=tuple(ChatMessage("user", half) for half in halves))
        text = "".join(halves)
        return TextInputs(prompt=text) if kind == "prompt" else TextInputs(text=text)

    check_length(inputs(10 * CHARS_PER_TOKEN_MAX), 10, kind)
    check_length(inputs(11 * CHARS_PER_TOKEN_MAX), 0, kind)
    with pytest.raises(InvalidRequest) as refusal:
        check_length(inputs(10 * CHARS_PER_TOKEN_MAX + 1), 10, kind)
    assert (refusal.value.code, refusal.value.field) == ("context_too_long", kind)
    check_length(TextInputs(text=("a" * 99_999,)), 1, kind)


def test_a_prompt_that_cannot_fit_is_not_tokenised() -> None:
    schema = {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]}
    row = route("chat", service_type="text-generation", input_schema=schema, tokenizer="t.json", context_tokens_max=6)
    ingress = machine(row, encoders=Encoders({"t.json": loaded(WORD_PIECE)}))
    made = ingress.routes.token_cache.counts
    prompt = "fox " * (2 * CHARS_PER_TOKEN_MAX)
    error = take_up(ingress, record(body(model="chat", inputs={"prompt": prompt}))).results[0].error
    assert error is not None
    assert (error.code, error.field, made.tokens_made) == ("context_too_long", "inputs.prompt", 0)


def test_lists_of_texts_are_left_to_the_engine() -> None:
    tokeniser = Tokeniser(loaded(WORD_PIECE), TokenCache())
    assert text_tokens(tokeniser, TextInputs(text=("a", "b"))) is None
    assert text_tokens(tokeniser, TextInputs()) is None


def test_ingress_puts_tokens_on_the_work_item() -> None:
    schema = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
    row = route("minilm", service_type="embedding", input_schema=schema, tokenizer="t.json", context_tokens_max=6)
    ingress = machine(row, encoders=Encoders({"t.json": loaded(WORD_PIECE)}))
    good = take_up(ingress, record(body(model="minilm", inputs={"text": "the fox"}))).work[0]
    assert list(good.token_ids or ()) == WORD_PIECE.encode("the fox").ids
    error = take_up(ingress, record(body(model="minilm", inputs={"text": "the fox " * 20}))).results[0].error
    assert error is not None
    assert (error.code, error.field) == ("context_too_long", "inputs.text")
