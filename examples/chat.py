"""Talk to a model of transformers that learned chats: python examples/chat.py FOLDER

A line from the keyboard, or of a file on stdin, is a question; an empty line begins a new conversation.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Chat:
    """Answers in a conversation, by the tokenizer's chat template."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.messages: list[dict[str, str]] = []

    def ask(self, question: str, **generation: object) -> str:
        self.messages.append({"role": "user", "content": question})
        answer = self.complete(self.messages, **generation)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def complete(self, messages: list[dict[str, str]], **generation: object) -> str:
        """What the model says next; `generation`: options of `generate`, by default the likeliest token."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": self.tokenizer.eos_token_id}
        with torch.no_grad():
            ids = self.model.generate(**prompt, **options | generation)
        return self.tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main(folder: str) -> None:
    chat, asks = Chat(folder), sys.stdin.isatty()
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        question = line.strip()
        if not asks:
            print(question)
        if question:
            print(chat.ask(question))
        else:
            chat.messages.clear()


if __name__ == "__main__":
    main(sys.argv[1])
