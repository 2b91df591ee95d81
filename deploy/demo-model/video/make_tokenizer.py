"""Makes the tokenizer of the video model, UMT5's SentencePiece unigram with one piece for each word of the captions, and
the held-out prompts. The weights depend on the tokenizer's order of pieces."""
import io
import json
import os
import random
import shutil
import tempfile

import sentencepiece
from transformers import T5Tokenizer

import clips  # puts the pictures' folder on the path
from make_tokenizers import write_word_pieces

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPTS = 200


def make_tokenizer(folder, lines):
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:  # folds case; UMT5's own rules take 300 kB
        rules.writelines(f"{ord(c):X}\t{ord(c.lower()):X}\n" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type="unigram", vocab_size=160, pad_id=0, eos_id=1,
            bos_id=2, unk_id=3, normalization_rule_tsv=rules.name, character_coverage=1.0, num_threads=1,
            required_chars="abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-()", hard_vocab_limit=False, minloglevel=2)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        write_word_pieces(model, lines, work)
        T5Tokenizer.from_pretrained(work, extra_ids=0, model_max_length=512, bos_token="<s>").save_pretrained(folder)


def main():
    rng = random.Random(7)
    lines = [clips.caption(rng, rng.choice(clips.triples())) for _ in range(40000)]
    make_tokenizer(os.path.join(HERE, "model", "tokenizer"), lines)
    chosen = (clips.held_out() * 5)[:PROMPTS]
    rng.shuffle(chosen)
    with open(os.path.join(HERE, "heldout_prompts.jsonl"), "w", encoding="utf-8") as f:
        for clip in chosen:
            f.write(json.dumps({"prompt": clips.caption(rng, clip), **dict(zip(("shape", "colour", "direction"), clip))}) + "\n")


if __name__ == "__main__":
    main()
