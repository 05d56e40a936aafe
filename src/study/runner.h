// Runs as child processes, several at a time: a crash does not affect the other runs, and whatever
// ends this process interrupts them with a checkpoint, so that all can be resumed. Other processes
// may work on the same runs (leases.h).
#pragma once

#include <functional>

#include "study/leases.h"
#include "study/study.h"

namespace horner::study {

enum class Status { waiting, running, finished, failed, stopped, given_up };

struct RunState {
  Status status = Status::waiting;
  bool here = false;             // started by this process
  bool alive = false;            // another process has it, and a heartbeat was seen
  int64_t step = 0, judged = 0;  // the latest; the one at which it was last judged
  double loss = 0, tokens_per_second = 0, seconds_left = 0;
  std::string why = "";       // why it failed: the last line of its log
  std::string hopeless = "";  // why it is given up
};

struct Runner {
  std::filesystem::path program;  // horner itself
  size_t jobs = 1;
  // The GPUs, as CUDA_VISIBLE_DEVICES names them: each run sees the one that has the fewest runs.
  // With fewer than two, all runs see what this process sees.
  std::vector<std::string> gpus = {};
  Leases& leases;
  bool wait = true;  // for runs that other processes have, not only until they are seen to live
  std::function<bool()> stop = [] { return false; };
  std::function<void(const std::vector<RunState>&)> show = [](const std::vector<RunState>&) {};
  // Called with the folder of a run that has all its steps, before others see it as finished.
  std::function<void(const Run&)> complete = [](const Run&) {};
  std::function<bool(const Run&)> is_complete = [](const Run&) { return true; };
  // Why to give up a run that is running, or "".
  std::function<std::string(const Run&)> hopeless = [](const Run&) { return ""; };
};

// Throws if a run cannot begin in its folder, because that holds a run with other settings or is in
// use by a process that is not of a study. Writes nothing.
void check_runs(const std::vector<Run>&);

// Returns when all runs have ended, those of other processes too if `wait`, or stop() returns true.
// Skips finished runs.
std::vector<RunState> run_all(const std::vector<Run>&, const Runner&);

// The GPUs that this process sees, as Runner has them.
std::vector<std::string> visible_gpus();

// Whether the run's folder has the result of all its steps.
bool is_finished(const Run&);

// Why the run was given up; "" if it was not.
std::string why_given_up(const Run&);

// What decides whether crashes of a run count: its settings, without those of the machine.
std::string digest(const train::Settings&);

}  // namespace horner::study
