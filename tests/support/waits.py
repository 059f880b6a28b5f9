"""Every wait of the engine, of split sequences, the staged kernels and the head, with a test that fails without it.

tests/engine/test_each_wait.py removes them one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STREAMS = "tests/engine/test_streams.py::test_"
_DRAINS = "tests/engine/test_drains.py::test_"
_NEAR = "tests/kernels/test_near_and_far.py::test_"
_SEQUENCE = "tests/sequence/test_"
_OFFLOAD = "tests/hf/test_offload.py::test_copies_follow_what_is_computed_and_come_before_they_are_used[late]"


@dataclass(frozen=True)
class Wait:
    """`text`: what waits, found once in all sources, with what stands before and after it; `without`: what takes its
    place. `test`: fails then, where simulated streams are late.
    """

    name: str
    text: str
    test: str
    without: str = "pass"
    after: str = ""
    before: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds `text` as its group "wait", whatever object it is called on."""
        called_on = r"\b(?:\w+\.)*" if self.text[0].isidentifier() else ""
        after = rf"{re.escape(self.after)}\s+" if self.after else ""
        before = rf"(?=\s*{re.escape(self.before)})" if self.before else ""
        return re.compile(f"{after}(?P<wait>{called_on}{re.escape(self.text)}){before}")


_DRAINED = "for stream in (*self._computing, *self._copy, self._add):"
_DONE = _DRAINS + "peers_see_what_the_device_has_done"

WAITS = (
    # ---------------------------------------------------------------------- streams
    Wait(
        "a copy from peers waits for what was computed before",
        "stream.wait_stream(copies.home)",
        _STREAMS + "copies_follow_what_is_computed_before[late]",
    ),
    Wait(
        "what is computed waits for copies",
        "current.wait_event(done)",
        _STREAMS + "copies_come_when_they_are_waited_for",
    ),
    Wait(
        "memory is freed after the copies into it",
        "copies.home.wait_event(done)",
        _STREAMS + "memory_is_freed_after_the_copies_into_it[late]",
    ),
    Wait(
        "memory is freed after other streams have read it",
        "copies.home.wait_stream(user)",
        _STREAMS + "memory_is_freed_after_all_streams_have_used_it[late]",
    ),
    Wait(
        "the streams that read memory are noted",
        "copies.users.append(current)",
        _STREAMS + "memory_is_freed_after_all_streams_have_used_it[late]",
    ),
    Wait(
        "an addition waits for its gradient",
        "self._add.wait_stream(self._current())",
        _STREAMS + "additions_follow_what_is_computed_before[late]",
    ),
    Wait(
        "a gradient is held while its addition runs",
        "(self._add.record_event(), gradient)",
        _STREAMS + "gradients_live_until_they_are_added[all-late]",
        "(self._add.record_event(), gradient.clone())",
    ),
    Wait(
        "a gradient is freed when its addition is done",
        "while self._in_flight and self._in_flight[0][0].query():",
        _STREAMS + "gradients_live_until_they_are_added[all-late]",
        "while self._in_flight:",
    ),
    Wait(
        "the memory of the oldest gradient waits for its addition",
        "self._current().wait_event(self._in_flight[0][0])",
        _STREAMS + "gradients_live_until_they_are_added[two-late]",
    ),
    Wait(
        "what follows additions waits for them",
        "enqueue(self._add, work)",
        _STREAMS + "what_follows_additions_is_done_after_them[late]",
        "work()",
        before="def",
    ),
    Wait(
        "additions are made before this rank waits for peers",
        "has_come(self._add.record_event())",
        _STREAMS + "additions_are_made_before_a_wait_for_peers",
    ),
    # ---------------------------------------------------------------------- drains
    Wait(
        "a drain waits",
        "while not self.device.has_come(done):",
        _STREAMS + "additions_follow_what_is_computed_before[late]",
        "while False:",
    ),
    Wait(
        "a drain waits for the stream that is current",
        "self._current()",
        _DRAINS + "whole_parameters_have_been_read[gathered]",
        before="for stream in",
    ),
    Wait(
        "a drain waits for streams that computed",
        _DRAINED,
        _STREAMS + "drained_are_all_streams_on_which_something_was_computed[late]",
        "for stream in (*self._copy, self._add):",
    ),
    Wait(
        "a drain waits for copies",
        _DRAINED,
        _STREAMS + "drained_are_all_streams_on_which_something_was_computed[late]",
        "for stream in (*self._computing, self._add):",
    ),
    Wait(
        "a drain waits for additions",
        _DRAINED,
        _STREAMS + "additions_follow_what_is_computed_before[late]",
        "for stream in (*self._computing, *self._copy):",
    ),
    Wait(
        "a stream that is current is noted",
        "self._computing[stream] = None",
        _STREAMS + "drained_are_all_streams_on_which_something_was_computed[late]",
    ),
    Wait(
        "a stream on which the caller computes is noted",
        "self._current()",
        _STREAMS + "drained_are_all_streams_on_which_something_was_computed[late]",
        after="def computes_here(self) -> None:",
    ),
    Wait(
        "all streams of an engine note where modules compute",
        "streams.computes_here()",
        _DRAINS + "a_minibatch_ends_when_every_stream_has_ended[on demand]",
        after="for streams in self._all:",
    ),
    Wait(
        "a forward notes its stream",
        "computes_here()",
        _DRAINS + "a_minibatch_ends_when_every_stream_has_ended[on demand]",
        before="self._forward_start_s =",
    ),
    Wait(
        "the stream of a kernel that adds is noted",
        "computes_here()",
        _DRAINS + "a_kernel_that_adds_is_waited_for",
        before="# the kernel that adds",
    ),
    Wait(
        "a drain waits for an engine's streams",
        "streams.drain(self._timeout_s, purpose)",
        _DONE,
    ),
    Wait(
        "a drain waits for streams of a model that was sharded before its root",
        "self._all += other._all",
        _DRAINS + "what_was_sharded_before_its_root_is_drained",
    ),
    Wait(
        "a drain waits for the streams of split sequences",
        "also(streams)",
        _SEQUENCE + "watch.py::test_a_drain_waits_for_split_sequences_and_looks_at_their_waits",
    ),
    Wait(
        "a drain checks the waits of split sequences",
        "watch(sync)",
        _SEQUENCE + "watch.py::test_a_drain_waits_for_split_sequences_and_looks_at_their_waits",
    ),
    Wait(
        "a drain reports kernels whose waits timed out",
        "waiting.check()",
        _DRAINS + "a_kernel_that_waited_in_vain_fails_the_minibatch_on_all_ranks",
    ),
    Wait(
        "a drain checks the staged kernels",
        "watch(parameter.staging)",
        _DRAINS + "a_kernel_that_waited_in_vain_fails_the_minibatch_on_all_ranks",
    ),
    # ---------------------------------------------------------------------- the engine
    Wait(
        "at the entry gradients are cleared and masters published before the barrier",
        'drain("clearing gradients and publishing before a minibatch")',
        _DONE,
    ),
    Wait(
        "at the exit gradients are added before the barrier",
        'drain(f"the microbatches of minibatch {self.number}")',
        _DONE,
    ),
    Wait(
        "gradients are divided and cast before the optimizer has them",
        'drain("reducing the gradients")',
        _DONE,
    ),
    Wait(
        "masters are copied before peers see the publication",
        'drain("publishing the parameters")',
        _DONE,
    ),
    Wait(
        "masters are copied before replicas exchange them",
        'drain("publishing the own part of the parameters")',
        "tests/engine/test_hybrid.py::test_odd_rows[dtype1-others]",
    ),
    Wait(
        "whole parameters are read before a rank looks whether they were torn",
        'drain("reading whole parameters")',
        _DRAINS + "whole_parameters_have_been_read[gathered]",
    ),
    Wait(
        "an evaluation has read before a rank looks whether that was torn",
        'drain("reading the parameters")',
        _DRAINS + "an_evaluation_has_read_when_it_looks_whether_it_was_torn[on demand]",
    ),
    Wait(
        "an evaluation waits for what peers publish",
        "wait_readable()",
        "tests/engine/test_evaluation.py::test_rank_0_alone_right_after_its_step",
        after="else:",
    ),
    Wait(
        "full_parameters waits for what peers publish",
        "wait_readable()",
        "tests/engine/test_evaluation.py::test_rank_0_alone_right_after_its_step",
        before="whole =",
    ),
    # ---------------------------------------------------------------------- whole parameters
    Wait(
        "what reads gathered parameters waits for their copies",
        "self._streams.wait(self._copies)",
        _STREAMS + "filled_used_and_freed[late]",
        before="def release",
    ),
    Wait(
        "a forward or backward of a unit waits for its parameters",
        "unit.wait()",
        "tests/engine/test_gathered.py::test_tied_over_units",
    ),
    Wait(
        "unshard waits for the parameters",
        "self.wait()",
        _DRAINS + "unsharded_parameters_are_there",
        after="self.fetch()",
    ),
    Wait(
        "an operator waits for parameters that are prefetched",
        "self.gathered.wait()",
        _DRAINS + "an_operator_waits_for_what_was_fetched_ahead",
    ),
    # ---------------------------------------------------------------------- split sequences
    Wait(
        "keys and values are copied after their flags have come",
        "self._wait()",
        _SEQUENCE + "order.py::test_keys_and_values_are_read_after_their_flags_have_come[True]",
        after="def copy() -> None:",
    ),
    Wait(
        "attention waits for the copies of keys and values",
        "self._streams.wait(self._copies)",
        _SEQUENCE + "order.py::test_keys_and_values_are_read_after_their_flags_have_come[True]",
        before="return tuple(self._rows)",
    ),
    Wait(
        "keys and values in joined memory are read after their flags have come",
        "self._wait()",
        _SEQUENCE + "order.py::test_keys_and_values_are_read_after_their_flags_have_come[False]",
        after="def finish(self) -> Rows:",
    ),
    Wait(
        "a buffer is written after others have read the layer before",
        "self._wait_for(Flag.READ, former.layer, former.epoch, former.whom, sets_next=doing)()",
        _SEQUENCE + "reused.py::test_a_late_reader_never_sees_the_next_layers_rows[cpu]",
    ),
    Wait(
        "others hear that attention has read after it has",
        "yield number, tuple(by_head(rows) for rows in read.finish())",
        _SEQUENCE + "reused.py::test_a_late_reader_never_sees_the_next_layers_rows[cpu]",
        "exchange.have_read(*self._of, self._runs); yield number, tuple(by_head(rows) for rows in read.finish())",
    ),
    Wait(
        "attention that joins keys copies them before others hear that it has read",
        "*(each.clone() for _, pair in before.each() for each in pair)",
        _SEQUENCE + "order.py::test_others_write_their_next_layer_after_attention_has_read[False-AttentionOfJoined]",
        "*(each for _, pair in before.each() for each in pair)",
    ),
    Wait(
        "additions to keys' gradients wait for earlier ranks, where sums are exact",
        "after_adds(self._wait_for(*doing, before, sets_next=doing))",
        _SEQUENCE + "order.py::test_a_flag_follows_the_additions_and_these_follow_earlier_ranks_if_in_order[True]",
    ),
    Wait(
        "a flag says that gradients of keys are added after they are",
        "after_adds(",
        _SEQUENCE + "order.py::test_a_flag_follows_the_additions_and_these_follow_earlier_ranks_if_in_order[True]",
        "(lambda work: work())(",
        before="partial(",
    ),
    Wait(
        "gradients of keys are taken after their flags have come",
        "self._wait_for(Flag.ADDED, layer, self._epoch(spans, backward=True), whom)()",
        _SEQUENCE + "order.py::test_gradients_are_taken_after_the_flags_of_those_who_add",
    ),
    Wait(
        "forwards of pieces begin after what was enqueued before",
        'drain("what a former minibatch has left")',
        _SEQUENCE + "evaluation.py::test_the_device_has_ended_when_forwards_begin_and_when_they_end",
    ),
    Wait(
        "forwards of pieces end when the device has ended",
        'drain("forwards on pieces of samples")',
        _SEQUENCE + "evaluation.py::test_the_device_has_ended_when_forwards_begin_and_when_they_end",
    ),
    Wait(
        "a look at flags waits for its copy",
        "while not self._on.has_come(read) and time.monotonic() < until_s:",
        _SEQUENCE + "watch.py::test_a_look_waits_for_its_own_copy_only",
        "while False:",
    ),
    Wait(
        "the next plan waits for the watch of the one before",
        "self._watcher.join(_JOIN_S)",
        _SEQUENCE + "watch.py::test_the_watch_of_a_plan_does_not_stop_the_next",
    ),
    # ---------------------------------------------------------------------- checkpoints on the host
    Wait(
        "what was on the host is used after it has come back",
        "self._streams.follow_adds()",
        _OFFLOAD,
    ),
    Wait(
        "what follows additions on the device waits for them",
        "self._current().wait_stream(self._add)",
        _OFFLOAD,
    ),
    # ---------------------------------------------------------------------- staged kernels
    Wait(
        "a new buffer is filled after it was zeroed",
        "on.stream(), on.current().record_event()",
        _NEAR + "a_buffer_is_filled_after_it_was_made",
        "on.stream(), on.stream().record_event()",
    ),
    Wait(
        "a buffer is filled again after it was read",
        "staged.stream.wait_event(staged.read)",
        _NEAR + "a_buffer_is_filled_again_after_it_was_read[None]",
    ),
    Wait(
        "what reads a buffer is noted",
        "self.on.current().record_event(self.read)",
        _NEAR + "a_buffer_is_filled_again_after_it_was_read[None]",
    ),
    Wait(
        "a staged product notes that it reads",
        "is_read_now()",
        _NEAR + "a_buffer_is_filled_again_after_a_kernel_has_read_it[product]",
        before="@makes_descriptors\ndef linear_dx_staged",
    ),
    Wait(
        "a staged gradient notes that it reads",
        "is_read_now()",
        _NEAR + "a_buffer_is_filled_again_after_a_kernel_has_read_it[gradient]",
        before="def",
    ),
    Wait(
        "a staged kernel waits for the rows of near owners",
        "staged.on.current().wait_event(near_come)",
        _NEAR + "a_kernel_finds_the_rows_of_near_owners",
    ),
    # ---------------------------------------------------------------------- the head
    Wait(
        "the head's buffer is filled again after it was read",
        "pull.wait_stream(compute)",
        _NEAR + "the_heads_parts_come_before_they_are_read_and_stay_till_then[late-True]",
    ),
    Wait(
        "the head waits for the rows of a part",
        "compute.wait_event(arrived)",
        _NEAR + "the_heads_parts_come_before_they_are_read_and_stay_till_then[late-False]",
    ),
    Wait(
        "the head's buffers are freed after the last copy",
        "compute.wait_stream(pull)",
        _NEAR + "the_heads_buffers_are_freed_after_the_last_copy",
    ),
)
