#include "shared/telemetry/process.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

// A field of /proc/self/stat by its number in proc(5).
class Stat {
 public:
  Stat() {
    std::ifstream file("/proc/self/stat");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    // The name, field 2, may contain blanks.
    std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
    for (std::string field; fields >> field;) fields_.push_back(std::atof(field.c_str()));
    fields_.resize(50);
  }
  double operator[](std::size_t number) const { return fields_[number - 3]; }
  double seconds(std::size_t number) const { return (*this)[number] / static_cast<double>(sysconf(_SC_CLK_TCK)); }

 private:
  std::vector<double> fields_;
};

double age_s(const Stat& stat) {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - stat.seconds(22);
}

}  // namespace

double process_age_s() { return age_s(Stat()); }

void record_process() {
  static const Gauges resident("process_resident_memory_bytes"), size("process_virtual_memory_bytes"),
      open_fds("process_open_fds"), most_fds("process_max_fds"), threads("process_threads"),
      start("process_start_time_seconds");
  static const Counters cpu("process_cpu_seconds_total");
  const Stat stat;
  static const double kStarted =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - age_s(stat);
  resident().Set(stat[24] * static_cast<double>(sysconf(_SC_PAGESIZE)));
  size().Set(stat[23]);
  threads().Set(stat[20]);
  start().Set(kStarted);
  {
    auto counter = cpu();  // one scrape at a time
    counter.Increment(std::max(0.0, stat.seconds(14) + stat.seconds(15) - counter.Value()));
  }
  std::error_code error;
  if (const std::filesystem::directory_iterator files("/proc/self/fd", error); !error)
    open_fds().Set(static_cast<double>(std::distance(begin(files), end(files)) - 1));  // without that of the folder
  if (rlimit limit{}; getrlimit(RLIMIT_NOFILE, &limit) == 0) most_fds().Set(static_cast<double>(limit.rlim_cur));
}

void show_build(std::string_view version, std::string_view revision) {
  static const Gauges info("ditfleet_build_info");
  info({version, revision}).Set(1);
}

}  // namespace ditfleet::telemetry
