"""Models whose answers are known because their weights were set by hand."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

import headscope as hs
from headscope.model import Model
from headscope.tasks import capitals, coloured_objects, ioi, multiple_choice, needle, plain_text
from headscope.tasks.successor import SERIES

#: parts of the stream of `induction_toy`
POSITION, TOKEN, PREVIOUS = slice(0, 32), slice(32, 64), slice(64, 96)
#: what the model answers after a repeated token, and how much of it the head of the opposite sign takes away again
GAIN, ANTI = 6.0, 0.5
_SHARP = 60 * math.sqrt(32)  # e^-60 of attention goes anywhere but where it should


def _reading(at: slice, columns: int = 32) -> Tensor:
    """[d_model, 32]: reads the dims `at` of the stream as they are."""
    read = torch.zeros(128, columns, dtype=torch.float64)
    read[at] = torch.eye(32, dtype=torch.float64)
    return read


def induction_toy() -> Model:
    """A GPT-2 of 2 layers × 4 heads, 32 tokens, 32 positions, that continues what it has seen before.

    L0H0 attends to the token before and writes its code; L0H1 attends to equal tokens (itself too); L0H2 rests on
    position 0; L0H3 spreads evenly. L1H2 attends to what followed the present token before and writes GAIN times its
    code, L1H3 attends likewise and writes -ANTI times as much. The others spread evenly and write nothing, as the MLPs.

    The stream is one-hot position + one-hot token (+ one-hot previous token), so that a norm is one fixed affine map.
    """
    config = hf.GPT2Config(vocab_size=32, n_embd=128, n_head=4, n_layer=2, n_positions=32, n_inner=8, bos_token_id=None,
                           eos_token_id=None)  # fmt: skip
    model = hf.GPT2LMHeadModel(config).double().eval()
    first = torch.zeros(128, 32, dtype=torch.float64)
    first[0] = 1.0  # 1 in all columns at position 0
    shifted = _reading(POSITION).roll(1, 1)
    shifted[31] = 0.0  # position j stands for position j + 1
    # no earlier token stands before position 0, and its own must not be taken for one
    followed = _reading(PREVIOUS) - 2 * first
    sink = torch.zeros(128, 32, dtype=torch.float64)
    sink[0, 0] = 1.0
    heads: Heads = {
        (0, 0): (_SHARP * _reading(POSITION), shifted, _reading(TOKEN), _reading(PREVIOUS).T),
        (0, 1): (_SHARP * _reading(TOKEN), _reading(TOKEN), None, None),
        (0, 2): (_SHARP * torch.eye(32, dtype=torch.float64)[0], sink, None, None),
        (1, 2): (_SHARP * _reading(TOKEN), followed, _reading(TOKEN), GAIN * _reading(TOKEN).T),
        (1, 3): (_SHARP * _reading(TOKEN), followed, _reading(TOKEN), -ANTI * GAIN * _reading(TOKEN).T),
    }
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(_reading(POSITION).T)
        model.transformer.wte.weight.copy_(_reading(TOKEN).T)
        _write_heads(model, heads, {0: 2, 1: 3})
    return hs.load(model)


#: (layer, head) → query, key, value, output weights; a query given as [d_head] is the same everywhere
Heads = dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]


def _write_heads(model: Any, heads: Heads, ones: dict[int, int]) -> None:
    """Give a GPT-2 these heads and no others, and MLPs that write nothing. `ones`: how many ones the stream has in each
    layer, so that a norm is one fixed affine map, which is undone."""
    config = model.config
    width, size = config.n_embd, config.n_embd // config.n_head
    for block in model.transformer.h:
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_proj):
            linear.weight.zero_()
            linear.bias.zero_()
    for (layer, head), (query, key, value, output) in heads.items():
        attn, mean = model.transformer.h[layer].attn, ones[layer] / width
        spread = math.sqrt(mean - mean**2 + config.layer_norm_epsilon)
        for part, wanted in enumerate((query, key, value)):
            columns = slice(width * part + size * head, width * part + size * (head + 1))
            if wanted is not None and wanted.ndim == 1:
                attn.c_attn.bias[columns] = wanted
            elif wanted is not None:  # undo the norm
                attn.c_attn.weight[:, columns] = spread * wanted
                attn.c_attn.bias[columns] = mean * wanted.sum(0)
        if output is not None:
            attn.c_proj.weight[size * head : size * (head + 1)] = output


def choice_toy(known: float = 1.0, letter: float = 1.2) -> Model:
    """A GPT-2 of 3 layers × 8 heads that answers multiple choice, of which it knows what kind each word is.

    L0H0 brings the kind asked for to the last position, L0H1 a label to the word after it. L1H0 attends from the last
    position to the word of that kind, and writes there which option it is (first to fourth) and its letter. L2H0 attends
    to the label and names it, L2H1 does half as much: their queries hold `known` times the number of the option, matched by
    keys of the letters A to D, and `letter` times the letter, matched by every letter's. The others do nothing.
    """
    kinds = list(multiple_choice.KINDS)
    letters = string.ascii_uppercase
    option_words = [word for words in multiple_choice.KINDS.values() for word in words]
    asked_for = [kind.split()[1] for kind in kinds]
    template = re.findall(r"\S+", "Which of these is a an ? ( ) Answer :")
    tokenizer = word_tokenizer([*letters, *option_words, *template, *asked_for])
    n, n_positions = len(tokenizer), 26
    # parts of the stream: position, token, kind asked for, label before, number of the option, letter of the option
    position, token, asked, label, option, answer = (0, 32, 32 + n, 38 + n, 64 + n, 68 + n)
    width = 8 * 32
    assert answer + 26 <= width
    config = hf.GPT2Config(vocab_size=n, n_embd=width, n_head=8, n_layer=3, n_positions=32, n_inner=8, bos_token_id=None,
                           eos_token_id=None)  # fmt: skip
    model = hf.GPT2LMHeadModel(config).double().eval()
    ids = tokenizer.convert_tokens_to_ids

    def entries(pairs: list[tuple[int, int]], value: float = 1.0) -> Tensor:
        """[d_model, d_head] with `value` at these (dim of the stream, dim of the head)."""
        made = torch.zeros(width, 32, dtype=torch.float64)
        for dim, column in pairs:
            made[dim, column] = value
        return made

    asks = [(ids(kind), i) for i, kind in enumerate(asked_for)]
    is_kind = [(ids(word), i) for i, kind in enumerate(kinds) for word in multiple_choice.KINDS[kind]]
    at_word, at_label, last, noun = (10, 14, 18, 22), (8, 12, 16, 20), n_positions - 1, 5
    names = [(ids(name), i) for i, name in enumerate(letters)]
    number = entries([(token + ids(name), i) for i, name in enumerate("ABCD")], known)
    heads: Heads = {
        (0, 0): (entries([(position + last, 0)], _SHARP), entries([(position + noun, 0)]),
                 entries([(token + t, i) for t, i in asks]), entries([(asked + i, i) for _, i in asks]).T),
        (0, 1): (entries([(position + p, p - 2) for p in at_word], _SHARP),
                 entries([(position + p, p) for p in at_label]),
                 entries([(token + t, i) for t, i in names]), entries([(label + i, i) for _, i in names]).T),
        (1, 0): (entries([(asked + i, i) for i in range(6)], _SHARP), entries([(token + t, i) for t, i in is_kind]),
                 entries([(position + p, i) for i, p in enumerate(at_word)])
                 + entries([(label + i, 4 + i) for i in range(26)]),
                 (entries([(option + i, i) for i in range(4)]) + entries([(answer + i, 4 + i) for i in range(26)])).T),
    }  # fmt: skip
    query = entries([(option + i, i) for i in range(4)], known) + entries(
        [(answer + i, 4 + i) for i in range(26)], letter
    )
    key = number + entries([(token + t, 4 + i) for t, i in names], letter)
    for h, gain in ((0, GAIN), (1, GAIN / 2)):
        written = entries([(token + t, i) for t, i in names], gain).T
        heads[2, h] = (_SHARP / 3 * query, key, entries([(token + t, i) for t, i in names]), written)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:, position : position + 32] = torch.eye(32, dtype=torch.float64)
        model.transformer.wte.weight.zero_()
        model.transformer.wte.weight[:, token : token + n] = torch.eye(n, dtype=torch.float64)
        _write_heads(model, heads, {0: 2, 1: 3, 2: 5})
    return hs.load(model, tokenizer=tokenizer)


def word_tokenizer(words: list[str], *, bos: bool = False) -> Any:
    """A tokenizer whose tokens are these words (split at spaces and punctuation); id 0 is for all others.

    `bos`: the last id, put in front of every text.
    """
    vocabulary = {"[UNK]": 0} | {word: i for i, word in enumerate(dict.fromkeys(words), 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if not bos:
        return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    tokenizer.add_special_tokens(["[BOS]"])
    start = ("[BOS]", tokenizer.token_to_id("[BOS]"))
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[start])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[BOS]")


ITEMS = list(dict.fromkeys(item for items, _ in SERIES.values() for item in items))


def successor_toy(step: int = 1) -> Model:
    """A Llama of 1 layer whose stream holds one code a word and whose MLP gives back the code of the word it reads.

    L0H0 turns an item of an ordered list into the one `step` further on, L0H1 copies, L0H2 writes the item before,
    L0H3 writes nothing.
    """
    tokenizer = word_tokenizer([*ITEMS, ","])
    size = 4 * math.ceil(len(tokenizer) / 4)
    config = hf.LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=size, max_position_embeddings=32,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).double().eval()
    one = torch.eye(size, dtype=torch.float64)

    def moved(by: int) -> Tensor:
        found = torch.zeros(size, size, dtype=torch.float64)
        for items, cyclic in SERIES.values():
            ids = tokenizer.convert_tokens_to_ids(list(items))
            for i, token in enumerate(ids):
                if cyclic or 0 <= i + by < len(ids):
                    found[token, ids[(i + by) % len(ids)]] = 1.0
        return found

    with torch.no_grad():
        layer = model.model.layers[0]
        model.model.embed_tokens.weight.copy_(one)
        model.lm_head.weight.copy_(one)
        normed = math.sqrt(size / (1 + size * config.rms_norm_eps))  # what the norm makes of a 1 among zeros
        layer.mlp.gate_proj.weight.copy_(one)
        layer.mlp.up_proj.weight.copy_(one)
        layer.mlp.down_proj.weight.copy_(one / (normed * torch.nn.functional.silu(torch.tensor(normed).double())))
        layer.self_attn.v_proj.weight.copy_(one.repeat(4, 1))
        written = [moved(step), one, moved(-1), torch.zeros_like(one)]
        layer.self_attn.o_proj.weight.copy_(torch.cat(written).T)
    return hs.load(model, tokenizer=tokenizer)


def words() -> list[str]:
    """Every word of the text tasks, and the most common ones of plain text."""
    known = [*ITEMS, *capitals.CAPITALS, *capitals.CAPITALS.values(), *ioi._NAMES, *needle._NAMES, *needle._THINGS,
             *coloured_objects.COLOURS, *coloured_objects.OBJECTS, *string.ascii_uppercase,
             *(word for words in multiple_choice.KINDS.values() for word in words)]  # fmt: skip
    templates = re.findall(
        r"\S+",
        "The the capital of is . Q : What ? A When and went to , gave a secret object that hid store park office school "
        "house drink ball book pen gift I see an Which of these animal fruit colour country number vehicle Answer ( )",
    )
    common = Counter(re.findall(r"\w+|[^\w\s]+", " ".join(plain_text.sentences())))
    return list(dict.fromkeys([*known, *templates, *(word for word, _ in common.most_common(400))]))


def worded(*, bos: bool = False, **changes: Any) -> Model:
    """A random Llama in float64 (3 layers, 4 heads, 2 kv heads) with a tokenizer that knows the words of the tasks.

    `changes`: of its configuration.
    """
    torch.manual_seed(0)
    tokenizer = word_tokenizer(words(), bos=bos)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, **changes,
    }  # fmt: skip
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return hs.load(model, tokenizer=tokenizer)
