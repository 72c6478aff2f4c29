"""For each row of the table of what does not go together: flags that it refuses, flags beside them that no row refuses,
and a part of its sentence with the words of these flags."""

from __future__ import annotations

from rolltree.engine.settings.capabilities.agents import COMPARED, FORKS, OTHER_PROMPTS, UNTRAINED
from rolltree.engine.settings.capabilities.data import OF_ROWS

Case = tuple[str, str, str]
"""Flags without ``--`` that are refused, flags that are not, and a part of the sentence; flags are separated by two
blanks."""

FILE = "data.tasks=[]  data.path=p.jsonl  reward.verifier=exact"
NONE = "data.tasks=[]  trainer.prompts_per_step=0  evaluation.problems=0"
GIVEN = "demonstrations={path='g'}"
ALONE = f"{NONE}  {GIVEN}"
AGENT = "rollout.program=agent"
GROUP = "evaluation.problems=0  reward.verifier=mine.py:f  reward.group=true"
ENGINES = "rollout.engines=1"
RANGE = "rollout.engines={least=1,most=2}"
VLLM = "rollout.backend=vllm"
LORA = "model.lora={}"
TENSOR = f"trainer.ranks=2  trainer.tensor=2  {ENGINES}"
REFERENCE = "roles.reference={}"
CALLBACK = "loop.callback=dynamic_sampling"
PLAIN = f"{CALLBACK}  loop.train_context=plain"
MODELS = "models={verifier={}}"
TERM = "algorithm.terms=[{name='t',objective='sft'%s}]"
MORE = "roles.teacher={context='{prompt}'}"
COMPARED_TERM = "algorithm.terms=[{name='t',divergence='forward_kl'}]"
DEMONSTRATED = TERM % ",select='demonstrated'"
URL = "`roles.teacher.url`, `roles.teachers.NAME.url`"
SERVED = "roles.teacher={url='http://x'}"
TWO_TEACHERS = "roles.teachers={a={path='x'},b={url='http://x'}}"
EARLY = f"loop.score_early=true  {REFERENCE}"
NEXT = "model.lora={extrapolate={every=2,horizon=3}}"


EXACT = "reward.parts=[{name='a',verifier='exact'%s}]"
TWO_PARTS = "reward.parts=[{name='a',verifier='exact'},{name='%s',verifier='%s'%s}]"
SCHEDULED = EXACT % ",weight=[[1,1.0],[5,2.0]]"
TWO_TASKS = "data.tasks=[{name='chain_sum'},{name='gcd'}]"

PROGRAM = '`rollout.program` = "agent"'

CONTAINED = "rollout.program=environment  rollout.program_options={environment='harbor'}"

OF_KEYS: dict[tuple[str, str], Case] = {
    ("`data.tasks`, `data.path`, `data.source`", "each other"): ("data.path=p.jsonl", FILE, "and both are given"),
    ("`data.eval_path`", "`data.tasks`"): ("data.eval_path=e", f"{FILE}  data.eval_path=e", "leave it out"),
    ("`data.subset`, `split`, `eval_subset`, `eval_split`", "no set on the hub"): ("data.eval_split=test",
        f"{FILE}  data.eval_split=test",
        "`data.eval_split` chooses a part of a set on the hub; give `data.eval_path` too"),
    ("`data.format`", "no `data.path` or `data.eval_path`"): ("data.format=harbor",
        f"{FILE}  data.format=harbor  {CONTAINED}", "give one of them, or leave it out"),
    ('`data.format` = "harbor"', "a program without containers"): (f"{FILE}  data.format=harbor",
        f"{FILE}  data.format=harbor  {CONTAINED}", 'with environment = "harbor"'),
    ("`data.tools`", "no `data.chat`"): ("data.tools=['python']", "data.tools=['python']  data.chat=true",
        "set `data.chat` to true"),
    ("`data.image_key`", "`data.tasks`"): ("data.image_key=i", f"{FILE}  data.image_key=i", "have no pictures"),
    ("`data.n_key`", "`data.tasks`"): ("data.n_key=i", f"{FILE}  data.n_key=i", "have none"),
    ("`data.source_options`", "no `data.source`"): ("data.source_options={a=1}",
        "data.tasks=[]  data.source=games  data.source_options={a=1}  evaluation.problems=0  reward.verifier=exact",
        "name one, or leave them out"),
    ("`data.curriculum_options`", "no `data.curriculum`"): ("data.curriculum_options={a=1}",
        "data.curriculum_options={a=1}  data.curriculum=ucb", "name one, or leave them out"),
    ("`data.curriculum`", "`data.source`"): (
        "data.tasks=[]  data.source=games  data.curriculum=ucb  evaluation.problems=0  reward.verifier=exact",
        "data.curriculum=ucb", "a `data.source` chooses itself"),
    (f"`data.curriculum` = {', '.join(OF_ROWS)}", "`data.tasks`"): ("data.curriculum=limr",
        f"{FILE}  data.curriculum=limr", "`data.curriculum` = 'limr' needs `data.path`"),
    ("`demonstrations.rejected_key`", "`weight_key`, `logprob_key`, `messages_key`"): (
        "demonstrations={path='g',rejected_key='r',weight_key='w'}", "demonstrations={path='g',rejected_key='r'}",
        "of the demonstrations 'given' makes pairs"),
    ("`demonstrations.name`", "another table of the name"): ("demonstrations=[{path='g'},{path='h'}]",
        "demonstrations=[{path='g'},{path='h',name='more'}]", "called 'given'; give each a `name` of its own"),
    ("`demonstrated`, `chosen_and_rejected`", "no `demonstrations`"): (DEMONSTRATED, f"{GIVEN}  {DEMONSTRATED}",
        "`demonstrated` chooses demonstrations, and the run has none"),
    ("`demonstrated`, `chosen_and_rejected` `of` a table", "no table of the name"): (
        f"{GIVEN}  algorithm.terms=[{{name='t',pairs='chosen_and_rejected',pairs_options={{of='y'}}}}]",
        f"{GIVEN}  algorithm.terms=[{{name='t',pairs='chosen_and_rejected',pairs_options={{of='given'}}}}]",
        "`chosen_and_rejected` chooses demonstrations 'y', and the tables of `demonstrations` are called given"),
    ("`trainer.prompts_per_step` above 0", "no prompts"): (
        "data.tasks=[]  evaluation.problems=0  reward.verifier=exact", ALONE, "none of them is given"),
    ("`trainer.prompts_per_step` = 0", "no `demonstrations`"): (NONE, ALONE, "there are no `demonstrations`"),
    ("`evaluation.problems`", "no prompts"): (f"{ALONE}  evaluation.problems=4  reward.verifier=exact",
        f"{ALONE}  evaluation.problems=4  data.eval_path=e  reward.verifier=exact", "no problems to hold out"),
    ("`trainer.prompts_per_step` = 0", "loop.staleness above 0"): (f"{ALONE}  loop.staleness=1",
        f"{GIVEN}  loop.staleness=1", "so loop.staleness above 0 has no effect; leave it out, or sample"),
    ("`trainer.prompts_per_step` = 0", "loop.callback"): (f"{ALONE}  {CALLBACK}", CALLBACK, "so loop.callback has"),
    ("`trainer.prompts_per_step` = 0", "replay"): (f"{ALONE}  replay={{share=0.5}}", "replay={share=0.5}",
        "so replay has"),
    ("`trainer.prompts_per_step` = 0", "data.curriculum"): (f"{ALONE}  data.curriculum=ucb",
        f"{GIVEN}  data.curriculum=ucb", "so data.curriculum has"),
    ("`trainer.prompts_per_step` = 0", "models"): (f"{ALONE}  {MODELS}", f"{GIVEN}  {MODELS}", "so models has"),
    ('`reward.verifier` = "task"', "no `data.tasks`"): ("data.tasks=[]  data.path=p.jsonl", FILE,
        '`reward.verifier` is "task", which needs `data.tasks`; for other prompts set it to one of math, exact'),
    ("`evaluation.problems`", "`data.source` without `data.eval_path`"): (
        "data.tasks=[]  data.source=games  reward.verifier=exact",
        "data.tasks=[]  data.source=games  reward.verifier=exact  data.eval_path=e",
        "`data.source` has no held-out problems"),
    ("`data.disjoint`", "no `demonstrations`"): ("data.disjoint=true", f"data.disjoint=true  {GIVEN}",
        "if they are an earlier stage's"),
    ("`evaluation.problems`", "a judge of groups"): (f"{GROUP}  evaluation.problems=4", GROUP,
        "set `evaluation.problems` to 0"),
    ("`evaluation.every`", "`evaluation.problems` = 0"): ("evaluation.every=5  evaluation.problems=0",
        "evaluation.every=5", "give both or neither"),
    ("`evaluation.targets`", "`evaluation.every` = 0"): ("evaluation.targets=[0.5]",
        "evaluation.targets=[0.5]  evaluation.every=5", "set `evaluation.every`"),
    ("`reward.parts.when_wrong`", "`when_right`"): (TWO_PARTS % ("b", "exact", ",when_wrong='a',when_right='a'"),
        TWO_PARTS % ("b", "exact", ",when_wrong='a'"), "the part 'b' has"),
    ("`reward.parts.when_wrong`, `when_right`", "a judge of groups"): (
        "evaluation.problems=0  " + TWO_PARTS % ("b", "majority", ",when_wrong='a'"),
        "evaluation.problems=0  " + TWO_PARTS % ("b", "majority", ""), "the part 'b' compares all responses"),
    ("`reward.parts.name`", "another part of the name"): (TWO_PARTS % ("a", "exact", ""),
        TWO_PARTS % ("b", "exact", ""), "are called 'a'"),
    ("`reward.verifier`, `reward.options`", "`reward.parts`"): (EXACT % "" + "  reward.options={a=1}", EXACT % "",
        "`reward.options` does not go with `reward.parts`"),
    ("`reward.group`", "`reward.parts`"): (EXACT % "" + "  reward.group=true",
        "evaluation.problems=0  reward.parts=[{name='a',verifier='mine.py:f',group=true}]",
        "give it to the part that judges groups"),
    ("`reward.group`", "a verifier's name"): ("evaluation.problems=0  reward.verifier=exact  reward.group=true", GROUP,
        "and 'exact' is a name"),
    ("`reward.hosts`", "a judge of groups"): (f"{GROUP}  reward.hosts=1", GROUP, "compares several"),
    ("`reward.hosts`", 'a verifier "policy"'): ("reward.hosts=1  reward.verifier=policy",
        "reward.hosts=1  reward.verifier=exact", "leave `policy` out"),
    ("`reward.hosts`", "`reward.parts.role`"): ("reward.hosts=1  " + EXACT % ",role='r'",
        "reward.hosts=1  " + EXACT % "", "the part 'a' judges one"),
    ("`reward.hosts`", "a scheduled `reward.parts.weight`"): (f"reward.hosts=1  {SCHEDULED}",
        "reward.hosts=1  " + EXACT % ",weight=2.0", "the weight of the part 'a' follows"),
    ("`rollout.engines` with a program that judges", "a scheduled `reward.parts.weight`"): (
        f"rollout.program=mcts  {ENGINES}  {SCHEDULED}", f"rollout.program=mcts  {SCHEDULED}",
        "the program 'mcts' judges in the processes"),
    ("`reward.parts.when`", "no such `data.tasks`"): (EXACT % ",when=['chain_sum','sum']",
        EXACT % ",when=['chain_sum']", "names 'sum', which is not in `data.tasks`; they are chain_sum"),
    ("`data.tasks`", "no part that judges one"): (f"{TWO_TASKS}  " + EXACT % ",when='gcd'",
        f"{TWO_TASKS}  " + EXACT % ",when=['gcd','chain_sum']", "judges the task 'chain_sum'"),
    ("`algorithm.cut` below 1", "`algorithm.terms`"): (f"algorithm.cut=0.9  {TERM % ''}", "algorithm.cut=0.9",
        "several terms may need them"),
    ("`algorithm.cut` below 1", "`roles.critic`"): ("algorithm.cut=0.9  roles.critic={}", "algorithm.cut=0.9",
        "the critic learns from them"),
    ("`objective`, `pairs`, `loss`, `divergence` of a loss term", "each other"): (TERM % ",loss='laser'", TERM % "",
        "the loss term 't' needs one of"),
    ("`algorithm.terms.pairs`", "`select`"): (
        f"{REFERENCE}  algorithm.terms=[{{name='t',pairs='best_and_worst',select='best'}}]",
        f"{REFERENCE}  algorithm.terms=[{{name='t',pairs='best_and_worst'}}]", "the loss term 't' has `pairs`"),
    ("`algorithm.terms.name`", "another term of the name"): (
        "algorithm.terms=[{name='t',objective='sft'},{name='t',objective='opd'}]",
        "algorithm.terms=[{name='t',objective='sft'},{name='u',objective='opd'}]", "Two loss terms are called 't'"),
    ("`roles.reference.reset_every`", "`roles.reference.ema`"): ("roles.reference={reset_every=2,ema=0.5}",
        "roles.reference={ema=0.5}", "not both"),
    ("`roles.teacher.reset_every`", "`roles.teacher.ema`"): ("roles.teacher={reset_every=2,ema=0.5}",
        "roles.teacher={ema=0.5}", "not both"),
    ("`roles.teacher.path`", "`roles.teacher.reset_every`, `ema`"): ("roles.teacher={path='x',reset_every=2}",
        "roles.teacher={path='x'}", "leave the path or these out"),
    ("`roles.teachers`", "`roles.teacher`"): (f"{TWO_TEACHERS}  roles.teacher={{path='x'}}", TWO_TEACHERS, "not both"),
    ("`roles.teachers.NAME`", "neither `path` nor `url`"): ("roles.teachers={a={path='x'},b={}}", TWO_TEACHERS,
        "`roles.teachers.b` has no model"),
    (URL, "its `path`, `reset_every`, `ema` or `context`"): ("roles.teachers={a={path='x',url='http://x'}}", SERVED,
        "which `roles.teachers.a.path` does not go with"),
    **{
        (URL, other): (f"{SERVED}  {flags}", flags, "`roles.teacher.url` does not go with `")
        for other, flags in {
            "`rollout.temperature` other than 1, at which servers tell no log-probs": "rollout.temperature=0.8",
            "`loop.temperature_scale`, as servers tell log-probs at a temperature of 1": "loop.temperature_scale=0.8",
            "`data.image_key`, as only tokens are sent": f"{FILE}  data.image_key=i",
        }.items()
    },
    ("`roles.teacher.context`", "no loss term with `divergence`"): (f"{MORE}  {TERM % ''}", f"{MORE}  {COMPARED_TERM}",
        "add one, or leave it out"),
    ("`roles.teacher.context`", "`data.image_key`, whose pictures are part of the prompt"): (
        f"{MORE}  {COMPARED_TERM}  {FILE}  data.image_key=i", f"{COMPARED_TERM}  {FILE}  data.image_key=i",
        "leave one out"),
    ("`roles.teacher.context`", f"{PROGRAM}, whose calls have prompts of their own"): (
        f"{MORE}  {COMPARED_TERM}  {AGENT}", f"{COMPARED_TERM}  {AGENT}", "leave one out"),
    ("`roles.teacher.context`", '`algorithm.advantage` = "log_ratio", which reads the log-probs of tokens'): (
        f"{MORE}  {COMPARED_TERM}  algorithm.advantage=log_ratio", f"{MORE}  {COMPARED_TERM}", "leave one out"),
    ("`roles.reference.path` with `reset_every` or `ema`", "`model.lora`"): (
        f"{LORA}  roles.reference={{path='x',ema=0.5}}", f"{LORA}  roles.reference={{path='x'}}",
        "cannot become the policy of [model.lora]"),
    ('`algorithm.advantage` = "gae"', "no `roles.critic`"): ("algorithm.advantage=gae",
        "algorithm.advantage=gae  roles.critic={}", "give the run a [roles.critic]"),
    ("`loop.over_sampling`", "`loop.staleness` above 0"): ("loop.over_sampling=2.0  loop.staleness=1",
        "loop.over_sampling=2.0", "set staleness to 0"),
    ('`loop.over_sampling` = "valid_share"', "no `loop.callback`"): ("loop.over_sampling=valid_share",
        f"loop.over_sampling=valid_share  {CALLBACK}", "such as dynamic_sampling"),
    ('`loop.train_context` = "plain"', "no `loop.callback`"): ("loop.train_context=plain", PLAIN,
        "such as hint_ladder"),
    ('`loop.callback` = "hint_ladder"', '`loop.train_context` = "sampled"'): ("loop.callback=hint_ladder",
        "loop.callback=hint_ladder  loop.train_context=plain", 'set `loop.train_context` to "plain"'),
    ("`rollout.kv_tokens`", "a longer sequence"): ("rollout.kv_tokens=1279", "rollout.kv_tokens=1280",
        "= 1280 tokens) does not fit in `rollout.kv_tokens` = 1279; raise it"),
    ("`trainer.max_tokens`", "a longer sequence"): ("trainer.max_tokens=1300  evaluation.max_new_tokens=300",
        "trainer.max_tokens=1324  evaluation.max_new_tokens=300",
        "= 1324 tokens) does not fit in `trainer.max_tokens` = 1300; raise it"),
    ("`model.lora.extrapolate`", "`trainer.ranks` above 1"): (f"{NEXT}  trainer.ranks=2  {ENGINES}",
        f"{NEXT}  {ENGINES}", "does not go with `trainer.ranks` above 1 yet; set it to 1"),
    ("`model.lora.extrapolate`", "fewer updates than it learns from"): (f"{NEXT}  trainer.steps=7",
        f"{NEXT}  trainer.steps=8", "= 8 updates at least, and the run makes 7; raise `trainer.steps`"),
    ("`trainer.updates_per_step`", "fewer prompts"): ("trainer.updates_per_step=33", "trainer.updates_per_step=32",
        "`trainer.prompts_per_step` is 32; set the first to 32 or less, or the second to 33 or more"),
    ("`replay.share`", "`trainer.prompts_per_step` of which it leaves none"): ("replay={share=0.99}",
        "replay={share=0.9}", "= 32 is 32 groups, which leaves none to sample"),
    ("`loop.score_early`", "no reference or teacher of fixed weights"): (
        "loop.score_early=true  roles.reference={ema=0.5}",
        "loop.score_early=true  roles.reference={ema=0.5}  roles.teacher={path='x'}",
        "needs a reference or a teacher of fixed weights"),
    ("`loop.score_early`", "`trainer.ranks` above 1"): (f"{EARLY}  trainer.ranks=2  {ENGINES}", f"{EARLY}  {ENGINES}",
        "needs trainer.ranks = 1"),
    ("`loop.score_early`", "`models`"): (f"{EARLY}  {MODELS}", EARLY, "needs a run of one policy"),
    ("`loop.score_early`", '`placement.layout` = "colocated"'): (f"{EARLY}  {ENGINES}  placement.layout=colocated",
        f"{EARLY}  {ENGINES}", 'needs placement.layout = "split"'),
    ("`loop.score_early`", "`loop.temperature_scale` that changes, at `loop.staleness` above 0"): (
        f"{EARLY}  loop.staleness=1  loop.temperature_scale=[[1,1.0],[5,2.0]]",
        f"{EARLY}  loop.temperature_scale=[[1,1.0],[5,2.0]]", "needs a loop.temperature_scale that does not change"),
    ("`model.train_tower`", "`model.lora`"): (f"{LORA}  model.train_tower=true", "model.train_tower=true",
        "leave one of them out"),
    ("`rollout.drafts.tokens`, `remembered`", "`rollout.drafts.rows` = 0"): ("rollout.drafts.tokens=3",
        "rollout.drafts.tokens=3  rollout.drafts.rows=8", "`tokens` has no effect while `rows` is 0"),
    ("`models.NAME.objective_options`", "no `objective` of the policy's own"): (
        "models={verifier={objective_options={eps_high=0.3}}}",
        "models={verifier={objective_options={eps_high=0.3},objective='dapo'}}", "name it, or leave them out"),
    ("`models.NAME.terms`", '`select` = "injected"'): (
        "models={verifier={terms=[{name='t',objective='sft',select='injected'}]}}",
        "models={verifier={terms=[{name='t',objective='sft',select='best'}]}}",
        "the loss term 't' selects demonstrations"),
    ("`models.NAME`", "a name that metrics begin with"): ("models={reward={}}", "models={rewards={}}",
        "`models.reward` has a name"),
    **{
        ("`models`", other): (f"{MODELS}  {flags}", flags, f"`models.verifier` does not go with {other} yet; leave one")
        for other, flags in {
            "rollout.engines": ENGINES,
            'rollout.backend = "vllm"': VLLM,
            "rollout.stop, which would end a whole response,": "rollout.stop=['x']",
            "trainer.ranks above 1": f"trainer.ranks=2  {ENGINES}",
            "reward.hosts": "reward.hosts=1",
            "loop.staleness above 0": "loop.staleness=1",
            'loop.train_context = "plain"': PLAIN,
            "data.image_key": f"{FILE}  data.image_key=i",
            "model.lora": LORA,
            "rollout.window above 1": "rollout.window=2",
            "model.replay_routes": "model.replay_routes=true",
            "replay": "replay={share=0.5}",
            "roles.critic": "roles.critic={}",
            "roles.teacher": "roles.teacher={path='x'}",
            "roles.reference.path": "roles.reference={path='x'}",
        }.items()
    },
    ('`loop.train_context` = "plain"', "`data.image_key`"): (f"{PLAIN}  {FILE}  data.image_key=i", f"{PLAIN}  {FILE}",
        "exchanges no prompts with pictures"),
    ("`model.replay_routes`", '`rollout.backend` = "vllm"'): (f"model.replay_routes=true  {VLLM}",
        "model.replay_routes=true", "set it, or replay none"),
    ("`model.replay_routes`", "`rollout.compile`"): ("model.replay_routes=true  rollout.compile=true",
        "rollout.compile=true", "does not record routes"),
    ("`model.batch_invariant`", '`rollout.backend` = "vllm", `rollout.compile`'): (
        f"model.batch_invariant=true  {VLLM}", "model.batch_invariant=true",
        'does not hold for `rollout.backend` = "vllm", whose kernels'),
    ("`rollout.vllm_options`", '`rollout.backend` = "native"'): ("rollout.vllm_options={seed=1}",
        f"rollout.vllm_options={{seed=1}}  {VLLM}", "set it, or leave them out"),
    ("`rollout.drafts`", '`rollout.backend` = "vllm"'): (f"rollout.drafts.rows=8  {VLLM}", "rollout.drafts.rows=8",
        "set rollout.drafts.rows to 0"),
    ("`rollout.keep_pages` = true", '`rollout.backend` = "vllm", `placement.layout` = "colocated"'): (
        f"rollout.keep_pages=true  {VLLM}", "rollout.keep_pages=true",
        "in the run's own process, which shares the trainer's device; leave it out"),
    ("`rollout.window` above 1", '`rollout.backend` = "vllm"'): (f"rollout.window=8  {VLLM}",
        f"rollout.window=1  {VLLM}",
        "use `rollout.vllm_options`, or leave it out"),
    ("`rollout.window` above 1", "`model.replay_routes`"): ("rollout.window=8  model.replay_routes=true",
        "rollout.window=1  model.replay_routes=true", "set `rollout.window` to 1, or leave it out"),
    ("`rollout.python`", "no `rollout.engines`"): ("rollout.python=/p", f"rollout.python=/p  {ENGINES}",
        "set this, or leave it out"),
    ("`rollout.send_changes`", 'no `rollout.engines`, or `rollout.backend` = "vllm"'): (
        f"rollout.send_changes=true  {ENGINES}  {VLLM}", f"rollout.send_changes=true  {ENGINES}",
        "vLLM loads whole ones; leave it out"),
    ("`placement`", "no `rollout.engines` and no `reward.hosts`"): ("placement.restarts=3",
        "placement.restarts=3  reward.hosts=1", "set `rollout.engines` or `reward.hosts`, or leave it out"),
    ("`placement.per_rank`", "`trainer.ranks` = 1"): (f"placement.per_rank={{CPU=2}}  {ENGINES}",
        f"placement.per_rank={{CPU=2}}  {ENGINES}  trainer.ranks=2", "set these, or leave it out"),
    ("`trainer.ranks` above 1", "`data.image_key`"): (
        f"{FILE}  data.image_key=i  trainer.ranks=2  {ENGINES}", f"{FILE}  data.image_key=i  {ENGINES}",
        "does not go with `trainer.ranks` above 1 yet; set it to 1"),
    ("`trainer.ranks` above 1", '`placement.layout` = "colocated"'): (
        f"trainer.ranks=2  {ENGINES}  placement.layout=colocated", f"{ENGINES}  placement.layout=colocated",
        "does not go with `trainer.ranks` above 1; set it to 1"),
    ("`placement.per_engine`, `placement.layout`", "no `rollout.engines`"): (
        "reward.hosts=1  placement.per_engine={CPU=2}", f"{ENGINES}  placement.per_engine={{CPU=2}}",
        "are for `rollout.engines`; set these, or leave them out"),
    ("`rollout.engines` from `least` to `most`", '`placement.layout` = "colocated"'): (
        f"{RANGE}  placement.layout=colocated", RANGE, "as a number, or leave the layout out"),
    ('`placement.layout` = "colocated"', "`loop.overlap`"): (f"{ENGINES}  placement.layout=colocated  loop.staleness=1",
        f"{ENGINES}  placement.layout=colocated  loop.staleness=1  loop.overlap=false", "set `loop.overlap` to false"),
    ("`trainer.mirror`", "`trainer.ranks` = 1"): (f"trainer.mirror=true  {ENGINES}",
        f"trainer.mirror=true  {ENGINES}  trainer.ranks=2", "set these, or leave it out"),
    ("`trainer.tensor`", "`trainer.ranks` that it does not divide"): (
        f"trainer.ranks=3  trainer.tensor=2  {ENGINES}", f"trainer.ranks=4  trainer.tensor=2  {ENGINES}",
        "`trainer.tensor` = 2 does not divide `trainer.ranks` = 3; change one of them"),
    **{
        ("`trainer.tensor` above 1", other): (f"{TENSOR}  {flags}", flags, f"{other} does not ")
        for other, flags in {
            "`model.lora`": LORA,
            "a loss term with `divergence`": f"roles.teacher={{ema=0.5}}  {COMPARED_TERM}",
            "`model.batch_invariant`": "model.batch_invariant=true",
        }.items()
    },
    ("`rollout.compile`", '`rollout.backend` = "vllm"'): (f"rollout.compile=true  {VLLM}", "rollout.compile=true",
        "use `rollout.vllm_options`"),
    (PROGRAM, "`models`"): (f"{AGENT}  {MODELS}", AGENT, "`models.verifier` plays a role of a program"),
    (PROGRAM, f"`algorithm.advantage` = {', '.join(sorted(FORKS))}"): (f"{AGENT}  algorithm.advantage=treerl",
        "algorithm.advantage=treerl", "'treerl' follows from where a program lets responses fork"),
    (PROGRAM, f"`algorithm.advantage` = {', '.join(sorted(UNTRAINED))}"): (f"{AGENT}  algorithm.advantage=remax",
        "algorithm.advantage=remax", "'remax' needs responses that a program samples for it alone"),
    (PROGRAM, '`loop.train_context` = "plain"'): (f"{AGENT}  {PLAIN}", PLAIN, "needs one prompt for all responses"),
    (PROGRAM, f"`loop.callback` = {', '.join(sorted(OTHER_PROMPTS))}"): (f"{AGENT}  loop.callback=refine",
        f"{AGENT}  {CALLBACK}", "'refine' needs responses to a prompt that it chooses"),
    (PROGRAM, "`algorithm.terms.pairs` of responses"): (
        f"{AGENT}  algorithm.terms=[{{name='t',pairs='best_and_worst'}}]",
        f"{AGENT}  {GIVEN}  algorithm.terms=[{{name='t',pairs='chosen_and_rejected'}}]",
        "'t' with pairs = 'best_and_worst' compares responses"),
    (PROGRAM, f"`algorithm.terms.loss` = {', '.join(sorted(COMPARED))}"): (
        f"{AGENT}  algorithm.terms=[{{name='t',loss='ranking'}}]", "algorithm.terms=[{name='t',loss='ranking'}]",
        "'t' with loss = 'ranking' needs responses"),
}  # fmt: skip

FURTHER: list[tuple[str, str]] = [
    ("reward.hosts=1  reward.parts=[{name='a',verifier='policy'}]", "asks; set `hosts` to 0"),
    (EXACT % "" + "  reward.verifier=exact", "`reward.verifier` does not go with `reward.parts`"),
    ("evaluation.problems=0  reward.verifier=majority  reward.hosts=1", "compares several; set"),
    ("reward.parts=[{name='a',verifier='majority'}]", "cannot judge one response"),
    ("data.tasks=[]  data.path=p  reward.parts=[{name='a',verifier='task'}]", "a verifier of `rew"),
    (
        "model.batch_invariant=true  rollout.compile=true",
        "does not hold for `rollout.compile`",
    ),
    ("rollout.drafts.remembered=4096", "`remembered` has no effect"),
    ("replay={share=0.01}", "is 0 groups, which leaves none to draw"),
    ("loop.score_early=true", "of fixed weights in [roles]"),
    ("loop.score_early=true  roles.reference={reset_every=2}", "of fixed weights in [roles]"),
    ("rollout.send_changes=true", "is for `rollout.engines`"),
    (f"{RANGE}  {MODELS}", "`models.verifier` does not go with rollout.engines yet"),
    ("reward.hosts=1  placement.layout=colocated", "are for `rollout.engines`"),
    ("data.tasks=[]  data.path=p  data.source=games  reward.verifier=exact", "both are given"),
    ("data.path=p  data.source=games  evaluation.problems=0", "all are given"),
    ("data.curriculum=difficulty", "= 'difficulty' needs `data.path`"),
    (f"{GIVEN}  " + TERM % ",select='demonstrated',select_options={of='y'}", "demonstrations 'y'"),
    ("models={verifier={terms=[{name='t',objective='sft',pairs='best'}]}}", "loss term 't' needs one of"),
    (f"{LORA}  roles.reference={{path='x',reset_every=2}}", "cannot become the policy"),
    (f"rollout.program=mine.py:P  {ENGINES}  {SCHEDULED}", "mine.py:P' judges in the processes"),
]
"""Further flags that a row of keys refuses, each with a part of the sentence."""
