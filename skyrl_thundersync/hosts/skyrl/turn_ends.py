"""SkyRL's agent loop for chat templates without an end-of-turn token (conversation.py says what that means)."""

from __future__ import annotations

from skyrl.train.generators.skyrl_gym_generator import AgentLoopState, SkyRLGymGenerator, TurnOutput

from skyrl_thundersync.tasks.conversation import ends_open, ends_turn


class TemplateTurns(SkyRLGymGenerator):
    """SkyRL's generator whose context is the template's also where the next role's token ends a turn."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._ends_open = ends_open(self.tokenizer)

    def _update_agent_loop_state_with_multiturn_chat_template(
        self, agent_loop_state: AgentLoopState, turn_output: TurnOutput
    ) -> AgentLoopState:
        """The token that opens the observation takes the sampled one's place, with its log-prob and its count."""
        said, observed = turn_output.output_ids, turn_output.obs_ids
        if self._ends_open and observed and ends_turn(self.tokenizer, said):
            turn_output.output_ids, turn_output.obs_ids = [*said[:-1], observed[0]], observed[1:]
        return super()._update_agent_loop_state_with_multiturn_chat_template(agent_loop_state, turn_output)
