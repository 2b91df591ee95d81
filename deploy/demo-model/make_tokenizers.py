"""Makes the two tokenizers of the demo model from its captions: CLIP's byte-level BPE and T5's SentencePiece unigram.

Usage: make_tokenizers.py MODEL_FOLDER     (writes tokenizer/ and tokenizer_2/)

The classic files (vocab.json + merges.txt, spiece.model) and tokenizer.json are written side by side.
The weights belong to exactly these files: another version of sentencepiece orders the same pieces differently.
"""
import collections
import io
import json
import math
import os
import random
import re
import sys

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import CLIPTokenizer, T5Tokenizer

import scenes

CLIP_LENGTH = 77
T5_PIECES = 140


def corpus(count=60000, seed=7):
    rng = random.Random(seed)
    return [scenes.caption(rng, scenes.sample_scene(rng, 256, 256)) for _ in range(count)]


def byte_alphabet():
    """The printable stand-in of every byte in byte-level BPE, printable bytes first, as in CLIP."""
    kept = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    return [chr(b) for b in kept] + [chr(256 + i) for i in range(256 - len(kept))]


def learn_merges(lines, limit=400):
    """Byte-pair merges, most frequent pair first, until every word of the captions is one token."""
    words = collections.Counter(w for line in lines for w in re.findall(r"[a-z]+|[^\sa-z]+", line.lower()))
    split = {w: list(w[:-1]) + [w[-1] + "</w>"] for w in words}
    merges = []
    while len(merges) < limit:
        pairs = collections.Counter()
        for w, parts in split.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += words[w]
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        for w, parts in split.items():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = [parts[i] + parts[i + 1]]
                i += 1
    return merges


def make_clip(folder, lines):
    merges = learn_merges(lines)
    alphabet = byte_alphabet()
    tokens = alphabet + [c + "</w>" for c in alphabet] + ["".join(m) for m in merges]
    tokens = list(dict.fromkeys(tokens)) + ["<|startoftext|>", "<|endoftext|>"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump({t: i for i, t in enumerate(tokens)}, f, ensure_ascii=False)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.write("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    CLIPTokenizer.from_pretrained(folder, model_max_length=CLIP_LENGTH).save_pretrained(folder)


def write_word_pieces(model, lines, folder):
    """Writes spiece.model with a piece for each word: the trainer leaves many of so few words in several pieces."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    words = collections.Counter(w for line in lines for w in re.findall(r"[a-z]+", line.lower()))
    known = {p.piece: p for p in proto.pieces}
    for word, times in sorted(words.items()):
        piece = known.get("\u2581" + word) or proto.pieces.add(piece="\u2581" + word)
        piece.score = math.log(times / sum(words.values()))
    for piece in proto.pieces:
        if piece.type == piece.NORMAL and piece.piece.lstrip("\u2581") not in words:
            piece.score -= 8.0
    with open(os.path.join(folder, "spiece.model"), "wb") as f:
        f.write(proto.SerializeToString())


def make_t5(folder, lines):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="unigram", vocab_size=T5_PIECES,
        normalization_rule_name="nmt_nfkc_cf", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>",
        character_coverage=1.0, required_chars="abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-()", num_threads=1,
        hard_vocab_limit=False, minloglevel=2)
    os.makedirs(folder, exist_ok=True)
    write_word_pieces(model, lines, folder)
    T5Tokenizer.from_pretrained(folder, extra_ids=0, model_max_length=512).save_pretrained(folder)


if __name__ == "__main__":
    captions = corpus()
    make_clip(os.path.join(sys.argv[1], "tokenizer"), captions)
    make_t5(os.path.join(sys.argv[1], "tokenizer_2"), captions)
