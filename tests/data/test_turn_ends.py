"""Chat templates without an end-of-turn token: the talk's ids are the template's, and each sampled token counts once."""

import asyncio

import pytest
import skyrl_gym
from skyrl.train.generators.base import TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_thundersync.data.byte_tokenizer import byte_characters
from skyrl_thundersync.harbor.capture import CapturedChat
from skyrl_thundersync.hosts.skyrl.config import TrainConfig
from skyrl_thundersync.hosts.skyrl.train_loop import StreamingGenerator
from skyrl_thundersync.rollout.hook import TurnHook
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.stream.sources import TrajectoryId
from skyrl_thundersync.tasks.conversation import Conversation

SPECIAL = ("<|endoftext|>", "[GO]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TEMPLATE = (
    "[GO]{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRAJECTORY = TrajectoryId("task", 0)
TALK = (("ls", "a b"), ("cat a", ""), ("é", "no such file"), ("done", None))
ENDS = [
    ["<|user|>"] * 4,
    ["<|user|>", "<|observation|>", "<|endoftext|>", "<|user|>"],
    ["<|user|>", "", "<|user|>", ""],
]
"""What ends the policy's turns; "": a limit."""


def open_tokenizer():
    """Bytes and role tokens; a message begins with its role's, and nothing ends it, as in GLM-4's."""
    raw = Tokenizer(models.BPE(vocab={c: byte for byte, c in enumerate(byte_characters())}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=list(SPECIAL[1:])
    )
    made.chat_template = TEMPLATE
    return made


TOKENIZER = open_tokenizer()


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def template(messages):
    return TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def prompts():
    """The template's ids for the whole talk before each of its turns."""
    messages = [{"role": "user", "content": "go"}]
    for said, observed in TALK:
        yield template(messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observed}]


def check(prompts_seen, sources, ends):
    """Contexts are the template's; every sampled token is an action of one source, and no source's context has it again."""
    assert prompts_seen == list(prompts())
    held = []
    for turn, (source, (said, _), end) in enumerate(zip(sources, TALK, ends, strict=True)):
        action = encode(said) + encode(end)
        assert list(source.action_ids) == action and all(source.mask)
        assert [*held[: source.prefix], *source.context_ids] == prompts_seen[turn]
        # a branch only where the token that the policy ended its turn by is not the one that the template has there
        replaced = turn > 0 and ends[turn - 1] not in ("<|user|>", "")
        assert source.prefix == len(held) - replaced
        held = [*prompts_seen[turn], *action]


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_a_captured_chat_is_the_template_over_the_whole(ends):
    Conversation.check_template(TOKENIZER)
    chat, messages, seen = CapturedChat(TOKENIZER, True, "refuse"), [{"role": "user", "content": "go"}], []
    for (said, observed), end in zip(TALK, ends, strict=True):
        seen.append(list(chat.context(messages)))
        assert chat.sampled(encode(said) + encode(end)) == said
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": observed}]
    assert seen == list(prompts()) and chat.branches == 0


class Talk(BaseTextEnv):
    """Answers each turn with the next observation of TALK."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self._observations = [observed for _, observed in TALK]

    def step(self, action):
        observed = self._observations.pop(0)
        seen = [] if observed is None else [{"role": "user", "content": observed}]
        return BaseTextEnvStepOutput(observations=seen, reward=0.0, done=observed is None, metadata={})


class Scripted:
    """A rollout engine whose policy says the lines of TALK, ending its turns by `ends`; keeps the prompts it saw."""

    def __init__(self, ends):
        self.turns, self.prompts = [encode(said) + encode(end) for (said, _), end in zip(TALK, ends, strict=True)], []

    async def generate(self, input_batch, model=None):
        self.prompts.append(list(input_batch["prompt_token_ids"][0]))
        ids = self.turns.pop(0)
        return {
            "responses": [TOKENIZER.decode(ids, skip_special_tokens=True)],
            "response_ids": [ids],
            "response_logprobs": [[-1.0] * len(ids)],
            "stop_reasons": ["stop"],
            "policy_versions": [0],
        }

    async def finish_session(self, session_id):
        pass


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_skyrls_agent_loop_goes_on_from_the_template_over_the_whole(ends):
    if "talk" not in skyrl_gym.envs.registration.registry:
        skyrl_gym.register(id="talk", entry_point=Talk)
    cfg, sources, closed, engine = TrainConfig(), [], [], Scripted(ends)
    cfg.generator.use_conversation_multi_turn = True
    hook = TurnHook(engine, lambda: 0, seed=1)

    async def run():
        generator = StreamingGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=hook,
            tokenizer=TOKENIZER,
            policy_model_name="policy",
            outcomes=Outcomes(cfg.thundersync.outcomes),
        )
        generator.on_closed = lambda *told: closed.append(told)
        with hook.armed([TRAJECTORY], sources.append):
            await generator.agent_loop(
                [{"role": "user", "content": "go"}],
                "talk",
                {},
                max_tokens=64,
                max_input_length=4096,
                sampling_params={"logprobs": 1},
                trajectory_id=TrajectoryID("task", 0),
                training_phase="train",
            )

    asyncio.run(run())
    check(engine.prompts, sources, ends)
    ((trajectory, _, n_scored),) = closed
    assert trajectory == TRAJECTORY and n_scored == sum(source.n_scored for source in sources)
