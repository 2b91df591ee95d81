#include "coordinator/scheduling/service/dispatches.h"

#include <string_view>
#include <unordered_map>

namespace ditfleet::scheduling {

std::vector<queue::Dispatch> take_dispatches(Actions& actions) {
  std::vector<queue::Dispatch> out;
  if (actions.admit.empty() || actions.assign.empty()) return out;
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::unordered_map<std::string_view, std::size_t> admissions;  // job → its place
  std::vector<std::vector<queue::Dispatch::Placement>> placed(actions.admit.size());
  for (std::size_t i = 0; i < actions.admit.size(); ++i) {
    // One that was read twice keeps to the two calls: a dispatch would find the job admitted by the other.
    const auto [it, first] = admissions.emplace(actions.admit[i].id, i);
    if (!first || actions.admit[i].raw) it->second = kNone;
  }
  for (auto& assignment : actions.assign) {
    std::vector<queue::AssignRequest> left;
    for (auto& unit : assignment.units) {
      const auto it = admissions.find(unit.ref.job);
      if (it == admissions.end() || it->second == kNone) {
        left.push_back(std::move(unit));
      } else {
        placed[it->second].push_back({assignment.owner, std::move(unit)});
      }
    }
    assignment.units = std::move(left);
  }
  std::erase_if(actions.assign, [](const Actions::Assignment& a) { return a.units.empty(); });
  admissions.clear();  // its keys are about to move
  std::vector<queue::Admission> left;
  for (std::size_t i = 0; i < placed.size(); ++i) {
    if (placed[i].empty()) {
      left.push_back(std::move(actions.admit[i]));
    } else {
      out.push_back({std::move(actions.admit[i]), std::move(placed[i])});
    }
  }
  actions.admit = std::move(left);
  return out;
}

}  // namespace ditfleet::scheduling
