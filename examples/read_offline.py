"""Read an exported journal on a laptop, cell by cell (`# %%`, as notebooks and editors know them): no server needed.

belayer export --out night.belayer
python examples/read_offline.py night.belayer
"""

# %% The file, and whether it hangs together
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from belayer.ids import StreamKind
from belayer.journal.codec import Recorded, decode_entry
from belayer.journal.export import read_export
from belayer.projections.trajectory import Generation, Step, TrajectoryState, fold
from replay.audit import audit

path = Path(sys.argv[1])
report = audit(read_export(path))
print(f"{report.events} events, {len(report.findings)} findings")

# %% Each trajectory's events, folded into its state: what counts after every rewind
histories: dict[str, list[Recorded]] = defaultdict(list)
for stream, entry in read_export(path, lambda stream: stream.kind is StreamKind.TRAJECTORY):
    histories[stream.name] += decode_entry(stream, entry.epoch, entry.last_sequence, entry.body)
states = {name: fold(history) for name, history in histories.items()}
for name, state in states.items():
    print(f"{name}: {state.phase}, {state.boundary.number} actions, {state.rewinds} rewinds, reward {state.reward}")


# %% A sample to train on: every token of the live branch, with what the model is trained on and how likely it was
def sample(state: TrajectoryState) -> tuple[list[int], Sequence[int], list[float]]:
    """Token ids, loss mask and logprobs, equally many. Prompt and observations have mask 0 and logprob 0."""
    mask, logprobs = bytearray(len(state.prompt) // 4), [0.0] * (len(state.prompt) // 4)
    for segment in state.segments:
        match segment:
            case Generation():
                mask += segment.loss_mask()
                logprobs += segment.logprobs()
            case Step():
                seen = len(segment.committed.observation) // 4
                mask += bytes(seen)
                logprobs += [0.0] * seen
    return state.context(), mask, logprobs


for name, state in states.items():
    if state.phase == "finished":
        token_ids, mask, logprobs = sample(state)
        assert len(token_ids) == len(mask) == len(logprobs)
        mean = sum(logprobs) / max(1, sum(mask))
        print(f"{name}: {len(token_ids)} tokens, {sum(mask)} of them trained on, mean logprob {mean:.3f}")

# %% What happened to one of them, as a page
if states:
    from replay.timeline.page import write_page
    from replay.timeline.source import from_file

    name = next(iter(states))
    write_page(from_file(path, name), path.with_suffix(".html"))
    print(f"{path.with_suffix('.html')} shows {name}")
