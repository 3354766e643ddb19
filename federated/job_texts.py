"""What each key of a job's file does, in one sentence each. ``job_keys`` has what else there is to say of them.

By "section.key"; an option that several strategies, selections or models have, and that does not do the same for each,
is "section.key" for most and "section.NAME.key" for the others. Nothing that a test does not find in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SECTIONS: Final[Mapping[str, str]] = {
    "rounds": "How an iteration is run: who is waited for, how long, and how many iterations there are.",
    "job": "What the job is called, and what decides all that is drawn.",
    "model": "What is trained: a name, and that model's own options.",
    "data": "Whose data, and who holds what of it.",
    "training": "What a device does with its own rows: plain stochastic gradient descent.",
    "strategy": "How the server turns what devices learned into the next model: a name, and its own options.",
    "selection": "Who may train: a rule's name, or several joined by +, and their own options.",
    "compression": "How models and updates are made smaller on their way.",
    "privacy": "Differential privacy: which noise is added where, and how much of it may be spent.",
    "secure_aggregation": "Masks under which servers see the sum of updates and no single one.",
    "simulation": "What `headwater fl simulate` alone needs; servers pass it over.",
    "servers": "What real servers and their devices alone need; the simulator passes it over.",
    "into": "Where else what a model of items learned goes.",
}

TEXTS: Final[Mapping[str, str]] = {
    # rounds
    "rounds.start_fl_job_threshold": "Clients that start an iteration; needed unless members are named or the mode is "
    "buffered.",
    "rounds.start_fl_job_time_window_s": "How long an iteration waits for clients to start, from the first one on.",
    "rounds.update_model_ratio": "Share of the clients that started whose uploads close an iteration.",
    "rounds.update_model_time_window_s": "How long an iteration waits for uploads; in buffered mode, the time that one "
    "client has.",
    "rounds.global_iteration_time_window_s": "How long an iteration, or the filling of a buffer, may take in all.",
    "rounds.fl_iteration_num": "Iterations until the job is finished, valid or not.",
    "rounds.mode": "Whether an iteration waits for its cohort (sync), starts more clients than it needs "
    "(over_selection), or takes uploads as they come (buffered).",
    "rounds.kind": "Whether anybody may take part (cross_device), or every one of the named members does (cross_silo).",
    "rounds.members": "The clients of a cross_silo job, by id.",
    "rounds.absent": "Whether an absent member makes an iteration invalid (void), or the others go on (proceed).",
    "rounds.early_uploads": "Take uploads from the first start on instead of once all have started.",
    "rounds.over_selection": "How many times the needed uploads may start, in mode over_selection.",
    "rounds.buffer_size": "Uploads that make a version, in mode buffered.",
    "rounds.max_concurrency": "Clients that may train at the same time, in mode buffered.",
    "rounds.max_staleness": "Versions that an upload may be behind before it is refused, in mode buffered.",
    "rounds.staleness_exponent": "How steeply the weight of an upload falls with the versions that it is behind, in "
    "mode buffered.",
    "rounds.max_examples": "The most examples that a client counts for, whatever it claims.",
    "rounds.come_back_min_s": "The soonest that a client which is not wanted now is told to ask again.",
    "rounds.come_back_max_s": "The latest that a client which is not wanted now is told to ask again.",
    "rounds.aggregation_group": "Uploads that a server sums as one piece of work.",
    "rounds.aggregation_lease_s": "How long one server may hold a piece of the summing before another takes it over.",
    "rounds.aggregation_time_window_s": "How long the summing may take before the iteration is invalid.",
    "rounds.aggregation_attempts": "How often a piece of the summing is tried before the iteration is invalid.",
    # job
    "job.name": "What the job is called on servers, in 1 to 64 of a-z, 0-9, underscores, dots and hyphens.",
    "job.seed": "Decides all that is drawn: the same seed gives the same simulation.",
    # data
    "data.name": "The data set: digits, breast-cancer, ml-100k, or the path of a file or folder.",
    "data.clients": "How many clients there are; left out, as many as the data set has.",
    "data.partition": "Who holds what, such as iid, dirichlet:0.1, label:2 or user; left out, the data set's own rule.",
    "data.features": "Numbers in a row, which servers must know and do not see; the data tell the simulator.",
    "data.classes": "Classes that a row may have, which servers must know and do not see; the data tell the simulator.",
    "data.context": "The window of text that a row has, in characters.",
    "data.view": "What ratings are seen as: liked for a model of items.",
    "data.items": "The ids of the items of a model of items, in the order of their numbers.",
    # training
    "training.epochs": "Passes over a client's rows in an iteration; 1 unless steps are given.",
    "training.steps": "Gradient steps in an iteration, in place of epochs: everyone takes as many.",
    "training.batch_size": "Rows of a step; 0 takes all of a client's.",
    "training.rate": "The learning rate of the devices.",
    "training.proximal": "The pull towards the global model (FedProx's mu); 0 is none.",
    "training.momentum": "Heavy-ball momentum, which begins at zero in every iteration.",
    "training.clip_norm": "The largest L2 norm of a step's gradient; 0 leaves it as it is.",
    # compression
    "compression.upload": 'Steps that make uploads smaller, such as "top_k:0.03,quantise:1,deflate"; nothing sends '
    "float32.",
    "compression.download_bits": "Bits of a downloaded weight, sent as a difference (2 to 16); 0 sends whole models in "
    "float32.",
    # privacy
    "privacy.mechanism": "Which noise protects clients: on the device (local_, signds), at the server (central_), or "
    "on all devices together under masks (distributed_).",
    "privacy.protects": "What is clipped and noised: what a device learned, or its weights after training.",
    "privacy.clip": "The largest norm of what a client adds: L2, for local_laplace L1.",
    "privacy.clipping": "Whether the clip stays, or follows a quantile of the clients' norms.",
    "privacy.clip_quantile": "The share of norms that adaptive clipping leaves below the clip.",
    "privacy.clip_rate": "How fast adaptive clipping moves the clip.",
    "privacy.clip_count_noise": "Standard deviation of the noise on adaptive clipping's count of clients.",
    "privacy.per_layer": "Clip each field of the model by itself so that the whole keeps the clip.",
    "privacy.epsilon": "Epsilon of one report, for local_gaussian and local_laplace.",
    "privacy.delta": "Delta of one report, for local_gaussian.",
    "privacy.noise_multiplier": "Standard deviation of the sum's noise over the clip, for central and distributed "
    "mechanisms.",
    "privacy.budget_epsilon": "Epsilon that the job may spend before it stops; 0 only reports what it spent.",
    "privacy.budget_delta": "Delta at which epsilon is told: below one over the number of clients.",
    "privacy.accountant": "What counts epsilon: loss distributions (pld), Renyi divergences (rdp), or the tightest "
    "that can (auto).",
    "privacy.statistics": "Whether a model with BatchNorm statistics, which are data too, is refused, or the server "
    "keeps its own.",
    "privacy.sign_k": "The share of coordinates that signds takes for the largest.",
    "privacy.sign_eps": "Epsilon of the coordinates that a signds report names.",
    "privacy.sign_thr_ratio": "The share of a signds report's coordinates that is to be of the largest, on average.",
    "privacy.sign_global_lr": "The server's learning rate for signds.",
    "privacy.sign_dim_out": "Coordinates that a signds report names; 0 is found from the others.",
    "privacy.magnitude_epsilon": "Epsilon of the bit by which signds learns how large its steps are to be.",
    # secure_aggregation
    "secure_aggregation.protocol": "Whether updates are masked: by everyone with everyone (secagg), or with some "
    "neighbours (secagg+), which costs less.",
    "secure_aggregation.malicious": "Hold against servers that do not keep to the protocol, too.",
    "secure_aggregation.threshold": "Neighbours of a client that must be left to take its masks off; 0 is the smallest "
    "sound one.",
    "secure_aggregation.neighbours": "Neighbours that a client has in secagg+; 0 follows from what is assumed.",
    "secure_aggregation.colluding": "The share of clients that are assumed at most to work with the servers.",
    "secure_aggregation.dropouts": "The share of clients that are assumed at most to vanish in an iteration.",
    "secure_aggregation.clip": "The largest value of an update, either way, before it is masked.",
    "secure_aggregation.step_bits": "Values are rounded to multiples of 2 to the minus this.",
    "secure_aggregation.max_weight": "The largest weight of a client, which is a whole number under masks.",
    "secure_aggregation.registrar": "The public key (64 hexadecimal digits) of whoever certifies devices' signing "
    "keys; without one the servers do.",
    "secure_aggregation.stage_window_s": "How long a stage of the protocol waits for its clients.",
    "secure_aggregation.simulate": "Whether the simulator adds the same numbers without masks (sums), or makes every "
    "message (protocol).",
    # simulation
    "simulation.engine": "What trains the clients; auto is the fastest for the model and the device.",
    "simulation.device": "Where engine torch trains.",
    "simulation.memory_bytes": "What a chunk of clients in training may take; 0 is the device's default.",
    "simulation.threads": "Cores in use.",
    "simulation.ray": "Ray's tasks train the clients: \"local\", or a cluster's address; nothing is without Ray.",
    "simulation.state_bytes": "What all that clients remember between iterations may take.",
    "simulation.availability": "When clients can be reached: always, by chance, by day and night, or as a trace says.",
    "simulation.share": "The share of clients that can be reached at a time, for bernoulli and diurnal.",
    "simulation.trace": "The file of availability trace.",
    "simulation.patience_s": "Virtual time without any client after which the simulation gives up.",
    "simulation.checkpoint_every": "Iterations between checkpoints; 0 is never.",
    "simulation.evaluate_every": "Iterations between evaluations; 0 is never.",
    "simulation.habits.compute": "Median speed of clients, in examples of training per second.",
    "simulation.habits.compute_spread": "How unlike the clients' speeds are (standard deviation of the logarithm); "
    "0: all alike.",
    "simulation.habits.uplink": "Median speed of clients' uploads, in bytes per second.",
    "simulation.habits.downlink": "Median speed of clients' downloads, in bytes per second.",
    "simulation.habits.network_spread": "How unlike the clients' networks are (standard deviation of the logarithm); "
    "0: all alike.",
    "simulation.habits.dropout": "The share of starts that never upload.",
    "simulation.habits.stragglers": "The share of starts that are slow for that iteration.",
    "simulation.habits.straggler_factor": "How many times slower a straggler is.",
    "simulation.habits.check_in_s": "The mean time after which an idle client asks again.",
    "simulation.habits.charging": "The share of hours in which a client is charging.",
    "simulation.habits.unmetered": "The share of hours in which a client's network is unmetered.",
    "simulation.habits.idle": "The share of hours in which a client's device is idle.",
    # servers
    "servers.urls": "Addresses of the servers, for devices.",
    "servers.max_body_bytes": "The largest body that a server takes.",
    "servers.part_bytes": "The size of the parts in which large bodies are uploaded.",
    "servers.request_s": "How long a device waits for a reply.",
    # into
    "into.model": "The served model of the servers' stack into which each version goes; nothing: nowhere.",
    "into.weight": "Samples of a trainer that an iteration counts as there.",
    # model
    "model.name": "What is trained: a perceptron, softmax regression, a model of the next character, or one of items.",
    "model.hidden": "Width of the hidden layer; for a perceptron also several, one a layer.",
    "model.embedding": "Numbers that stand for a character.",
    "model.dim": "Numbers that stand for an item.",
    "model.objective": "What a model of items minimises: softmax over all items, or weighted squares (squares).",
    "model.temperature": "What scores are divided by before the softmax.",
    "model.regularisation": "How strongly large vectors are held down.",
    "model.steps": "Gradient steps that find a person's vector.",
    "model.rate": "The learning rate of those steps.",
    "model.unobserved": "What an item counts that a person did not choose, next to 1 for one that was.",
    # strategy
    "strategy.name": "How updates become the next model: means (fedavg, ...), server optimisers (fedadam, ...), means "
    "that few bad clients cannot steer (median, ...), or votes (signds).",
    "strategy.server_rate": "What the step of the server is multiplied by.",
    "strategy.max_steps": "The most local steps that count for a client, whatever it claims: training.steps if "
    "those are given.",
    "strategy.adaptive.max_steps": "The most local steps that a device is asked for.",
    "strategy.proximal": "The pull of devices towards the global model (mu).",
    "strategy.fednova.proximal": "That of the devices' training: from training.proximal unless given.",
    "strategy.momentum": "The share of the step before that the server's next one keeps.",
    "strategy.fednova.momentum": "That of the devices' training: from training.momentum unless given.",
    "strategy.rate": "The devices' learning rate, with a proximal term: from training.rate unless given.",
    "strategy.beta": "The share of the old mean of steps that the new one keeps.",
    "strategy.adaptivity": "What is added to the root of the second moment: less adapts more.",
    "strategy.second_beta": "The share of the old second moment that the new one keeps.",
    "strategy.population": "Clients that may ever take part: from data.clients unless given.",
    "strategy.steps": "Local steps that devices are asked for at first: training.steps if those are given.",
    "strategy.min_steps": "The fewest local steps that a device is asked for.",
    "strategy.low": "Divergence of devices below which they take more steps.",
    "strategy.high": "Divergence of devices above which they take fewer steps.",
    "strategy.growth": "What the number of steps is multiplied, or divided, by.",
    "strategy.memory": "The share of the old divergence in its moving average.",
    "strategy.bound": "The largest L2 norm of an update: longer ones are scaled down.",
    "strategy.trim": "The share of values that is cut at either end of each coordinate.",
    "strategy.bad": "Attackers that an iteration must withstand; it needs twice as many clients and three.",
    "strategy.keep": "Updates whose mean is taken; 0 is all but the bad, 1 is Krum.",
    "strategy.magnitude": "How large the largest coordinates of an update are taken to be at first.",
    # selection
    "selection.name": "Who may train: everyone who comes, some by chance, or those that the rule finds fit.",
    "selection.share": "The chance that a client which asks is let in.",
    "selection.rate": "The chance that a client is drawn for an iteration, which privacy may count on.",
    "selection.battery": "The least charge of a device's battery.",
    "selection.charging": "Only devices that are charging.",
    "selection.unmetered": "Only devices on an unmetered network.",
    "selection.idle": "Only devices that nobody uses.",
    "selection.deadline_s": "How long training and uploading may take a device, by its own speeds.",
    "selection.examples": "The local work in examples; 0 is what the device says that it holds.",
    "selection.upload_bytes": "The size of an update, for the time that uploading takes.",
    "selection.most": "In how many of the last iterations a client may have taken part.",
    "selection.window": "How many of the last iterations are counted.",
}
