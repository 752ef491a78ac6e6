-- Part of Slurm's cli_filter.lua (CliFilterPlugins=lua, where users submit), for jobs that ask for a GPU:
--
-- 1. A batch job that says nothing of a signal gets SIGUSR1 in its shell two minutes before its time is over:
--    with `exec gpuwarden train ...` as the script's last line the training saves and leaves with 75, and
--    RequeueExit=75 brings it back. What a user asks for himself stays. (job_submit.lua cannot: it is shown no
--    such field, on 22.05 and 24.11 alike.) The engine reads the signal that it sends before an end from
--    `#SBATCH --signal` in the script; one that is given here counts for Slurm alone.
-- 2. Whoever submits is told how to ask why his job is, or is not, going to be ended.
--
-- It is a default and a hint: whoever submits by other ways does without. Put your cluster's name in here.

local CLUSTER = "CLUSTER"
local SIGNAL = "B:USR1@120"
local gpu = false

local function given(value)
   -- 0@0 is how no signal is written.
   return value ~= nil and value ~= "" and value ~= "0@0"
end

function slurm_cli_setup_defaults(options, early_pass)
   return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
   for _, name in ipairs({"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"}) do
      local wanted = options[name]
      if given(wanted) and (name ~= "gres" or string.find(wanted, "gpu", 1, true)) then
         gpu = true
      end
   end
   if gpu and options["type"] == "sbatch" and not given(options["signal"]) then
      options["signal"] = SIGNAL
   end
   return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
   if gpu then
      slurm.log_info("what the rules say of it: gpuwarden why slurm-%s-%d-0", CLUSTER, job)
   end
   return slurm.SUCCESS
end
