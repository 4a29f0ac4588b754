"""Token ids of a conversation only grow, and are what the chat template writes for the whole of it."""

import pytest

from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
from skyrl_thundersync.tasks.conversation import Conversation
from skyrl_thundersync.tasks.terminal_text import describe_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPS = CHATML.replace("CONTENT", "m['content']")
DROPS_THINKING = CHATML.replace("CONTENT", "m['content'].split('</think>')[-1].lstrip('\\n')")


def tokenizer(template=None):
    made = byte_tokenizer()
    if template is not None:
        made.chat_template = template
    return made


@pytest.mark.parametrize("template", [None, KEEPS])
def test_turn_by_turn_is_the_template_over_the_whole(template):
    tok = tokenizer(template)
    Conversation.check_template(tok)
    messages = [{"role": "user", "content": "a\nß"}]
    talk = Conversation(tok, messages)
    for said, observed in (("```bash\nls\n```", "x y"), ("é", ""), ("<think>z</think>w", "[exit 1]")):
        before = list(talk.ids)
        assert talk.add_sampled([*tok.encode(said, add_special_tokens=False), tok.eos_token_id]) == said
        talk.add_observation(observed)
        assert talk.ids[: len(before)] == before
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observed}]
        assert talk.ids == tok.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_turn_that_was_cut_short_keeps_its_ids_and_is_closed():
    tok = tokenizer()
    talk = Conversation(tok, [{"role": "user", "content": "a"}])
    start = len(talk.ids)
    assert (
        talk.add_sampled([0xC3]) == "�"
    )  # half a character: its id survives, which encoding the text again would not give
    assert talk.ids[start:] == [0xC3, tok.eos_token_id]


def test_templates_that_rewrite_are_refused_with_the_first_token_that_differs():
    with pytest.raises(ValueError, match="not append-only: token .* of a two-turn probe is '<' turn by turn"):
        Conversation.check_template(tokenizer(DROPS_THINKING))


def test_what_a_harbor_agent_reads_is_what_the_environment_says():
    assert describe_text("a\n", 3) == "a\n[exit 3]" and describe_text(" \n", 0) == "(no output)"
    assert describe_text("a", 124, timed_out=True, timeout_s=5.0) == "a\n[timed out after 5 s]"
