#include "study/slurm.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstring>

#include "core/check.h"

namespace horner::study {

static constexpr int kSecondsBefore = 60;  // the time limit: for checkpoints

std::string shell_quoted(const std::string& word) {
  const char* const plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%";
  if (!word.empty() && word.find_first_not_of(plain) == word.npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string slurm_script(const SlurmJob& j) {
  std::string out =
      "#!/bin/bash\n# Written by 'horner study --slurm'. Every task takes runs of the "
      "study that nobody has.\n";
  const auto option = [&](const std::string& text) { out += "#SBATCH " + text + "\n"; };
  option("--job-name=" + shell_quoted("horner-" + j.name));
  option("--array=1-" + std::to_string(j.array));
  option("--output=" + shell_quoted(j.log));
  option("--open-mode=append");
  option("--requeue");
  option("--signal=B:USR1@" + std::to_string(kSecondsBefore));
  if (!j.time.empty()) option("--time=" + shell_quoted(j.time));
  if (!j.partition.empty()) option("--partition=" + shell_quoted(j.partition));
  if (j.gpus > 0) option("--gpus=" + std::to_string(j.gpus));
  if (j.cpus > 0) option("--cpus-per-task=" + std::to_string(j.cpus));
  for (const std::string& each : j.more) option(each);
  std::string command;
  for (const std::string& word : j.words) command += shell_quoted(word) + " ";
  out += "cd " + shell_quoted(j.directory) + " || exit 2\n" + command + "&\n";
  out += R"(worker=$!
again=
trap 'again=yes; kill -TERM $worker' USR1   # the time limit is near: write checkpoints and end
until wait $worker; code=$?; [ $code -ne 138 ]; do :; done   # 138: that signal came while it waited
if [ "$again" ] && [ $code -eq 143 ]; then
  exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $code
)";
  return out;
}

std::string submit(const std::string& script) {
  std::FILE* const pipe =
      ::popen(("sbatch --parsable " + shell_quoted(script) + " 2>&1").c_str(), "r");
  check(pipe != nullptr, "cannot start sbatch: ", std::strerror(errno));
  std::string said;
  for (int c; (c = std::fgetc(pipe)) != EOF;) said += char(c);
  const int status = ::pclose(pipe);
  while (said.ends_with('\n')) said.pop_back();
  const bool missing = WIFEXITED(status) && WEXITSTATUS(status) == 127;
  check(!missing, "no 'sbatch' here: run this where jobs are submitted, or submit '", script,
        "' there");
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "sbatch refused '", script, "': ", said);
  return said.substr(0, said.find(';'));  // "number;cluster"
}

}  // namespace horner::study
