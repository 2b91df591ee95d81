#include "pipeline/region/libraries/cudnn.h"
#include "pipeline/device/symbols.h"

#include <initializer_list>
#include <utility>
#include <vector>

namespace ditfleet::region {
namespace {

using pipeline::bind;

// Constants of cudnn_graph.h, stable in cuDNN 9.
enum : int { kFloat = 0, kBFloat16 = 9 };
enum Type : int {
  kHandle = 0,
  kDataType = 1,
  kBoolean = 2,
  kInt64 = 3,
  kPointer = 6,
  kHeuristicMode = 8,
  kDescriptor = 15,
  kChar = 24
};
enum Kind : int {
  kEngineConfig = 3,
  kHeuristic = 4,
  kPlan = 5,
  kGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
  kSdpaForward = 41
};
enum Attribute : int {
  kHeuristicModeOf = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kPlanJson = 405,
  kGraphHandle = 800,
  kGraphOps = 801,
  kAlignment = 900,
  kTensorType = 901,
  kDimensions = 902,
  kStrides = 903,
  kUniqueId = 906,
  kByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kSdpaQ = 2800,
  kSdpaK = 2801,
  kSdpaV = 2802,
  kSdpaOut = 2803,
  kSdpaScale = 2805,
};
constexpr int kModeA = 3;
constexpr std::size_t kOldest = 91500;
constexpr std::int64_t kMostConfigs = 8;
// Ids of the tensors in a plan and in its serialized form.
enum : std::int64_t { kQ = 1, kK = 2, kV = 3, kOut = 4, kScale = 5 };

}  // namespace

struct Cudnn::Library {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  std::size_t (*version)();
  int (*set_stream)(void* handle, void* stream);
  int (*make)(int kind, void** descriptor);
  int (*drop)(void* descriptor);
  int (*set)(void* descriptor, int attribute, int type, std::int64_t count, const void* values);
  int (*get)(void* descriptor, int attribute, int type, std::int64_t wanted, std::int64_t* count, void* values);
  int (*finish)(void* descriptor);
  int (*execute)(void* handle, void* plan, void* pack);
};

// One of the library's objects and the first error that it returned.
class Cudnn::Descriptor {
 public:
  Descriptor(const Library& lib, int kind) : lib_(&lib) { error_ = lib.make(kind, &object_); }
  Descriptor(Descriptor&& other) noexcept
      : lib_(other.lib_), object_(std::exchange(other.object_, nullptr)), error_(other.error_) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (object_) lib_->drop(object_);
  }

  void set(int attribute, int type, std::int64_t count, const void* values) {
    if (!error_) error_ = lib_->set(object_, attribute, type, count, values);
  }
  template <class T>
  void set(int attribute, int type, const T& value) {
    set(attribute, type, 1, &value);
  }
  void set(int attribute, const Descriptor& other) {
    if (!error_) error_ = other.error_;
    set(attribute, kDescriptor, 1, &other.object_);
  }
  int finish() {
    if (!error_) error_ = lib_->finish(object_);
    return error_;
  }
  int error() const { return error_; }
  void* get() const { return object_; }

 private:
  const Library* lib_;
  void* object_ = nullptr;
  int error_ = 0;
};

class Cudnn::Plan {
 public:
  Plan(Descriptor object, std::int64_t bytes) : descriptor(std::move(object)), workspace(bytes) {}
  const Descriptor descriptor;
  const std::int64_t workspace;
};

Result<const Cudnn::Library*> Cudnn::library() {
  // LibTorch's CUDA part has loaded it already, so its name alone finds it.
  static const Library* const opened = pipeline::open_library<Library>("libcudnn.so.9", [](void* library, Library& t) {
    return bind(library, "cudnnCreate", t.create) && bind(library, "cudnnDestroy", t.destroy) &&
           bind(library, "cudnnGetVersion", t.version) && bind(library, "cudnnSetStream", t.set_stream) &&
           bind(library, "cudnnBackendCreateDescriptor", t.make) &&
           bind(library, "cudnnBackendDestroyDescriptor", t.drop) && bind(library, "cudnnBackendSetAttribute", t.set) &&
           bind(library, "cudnnBackendGetAttribute", t.get) && bind(library, "cudnnBackendFinalize", t.finish) &&
           bind(library, "cudnnBackendExecute", t.execute);
  });
  if (!opened) return unavailable("[cudnn] cannot load libcudnn.so.9, a part of LibTorch with CUDA");
  if (opened->version() < kOldest)
    return unavailable("[cudnn] the version is " + std::to_string(opened->version()) +
                       "; attention with custom strides needs " + std::to_string(kOldest) + " or newer");
  return opened;
}

Result<std::shared_ptr<const Cudnn>> Cudnn::open() {
  auto lib = library();
  if (!lib) return lib.error();
  std::shared_ptr<Cudnn> made(new Cudnn);
  made->library_ = *lib;
  if (int e = (*lib)->create(&made->handle_); e != 0)
    return Error{Code::kDeviceFault, "[cudnn] cannot create a handle: status " + std::to_string(e)};
  return std::shared_ptr<const Cudnn>(std::move(made));
}

Cudnn::~Cudnn() {
  for (void* handle : {planner_, handle_})
    if (handle) library_->destroy(handle);
}

Result<void*> Cudnn::planner() const {
  if (!planner_)
    if (const int e = library_->create(&planner_); e != 0)
      return unavailable("[cudnn] cannot create a handle for plans: status " + std::to_string(e));
  return planner_;
}

std::size_t Cudnn::version() const { return library_->version(); }

Result<std::shared_ptr<const Cudnn::Plan>> Cudnn::plan(const AttentionShape& s) const {
  const Library& lib = *library_;
  std::lock_guard lock(planning_);
  const auto handle = planner();
  if (!handle) return handle.error();
  const auto tensor = [&](std::int64_t id, std::int64_t tokens, const AttentionShape::Strides& strides) {
    const std::int64_t sizes[] = {s.batch, s.heads, tokens, s.head_dim},
                       steps[] = {strides.batch, strides.head, strides.token, 1};
    Descriptor made(lib, kTensor);
    made.set(kTensorType, kDataType, kBFloat16);
    made.set(kDimensions, kInt64, 4, sizes);
    made.set(kStrides, kInt64, 4, steps);
    made.set(kUniqueId, kInt64, id);
    made.set(kAlignment, kInt64, std::int64_t{16});
    made.finish();
    return made;
  };
  const Descriptor q = tensor(kQ, s.tokens, s.q), k = tensor(kK, s.key_tokens, s.k), v = tensor(kV, s.key_tokens, s.v),
                   out = tensor(kOut, s.tokens, s.out);
  const std::int64_t ones[] = {1, 1, 1, 1};
  Descriptor scale(lib, kTensor);
  scale.set(kTensorType, kDataType, kFloat);
  scale.set(kDimensions, kInt64, 4, ones);
  scale.set(kStrides, kInt64, 4, ones);
  scale.set(kUniqueId, kInt64, std::int64_t{kScale});
  scale.set(kAlignment, kInt64, std::int64_t{16});
  scale.set(kByValue, kBoolean, true);
  scale.finish();

  Descriptor attention(lib, kSdpaForward);
  attention.set(kSdpaQ, q);
  attention.set(kSdpaK, k);
  attention.set(kSdpaV, v);
  attention.set(kSdpaOut, out);
  attention.set(kSdpaScale, scale);
  attention.finish();
  Descriptor graph(lib, kGraph);
  graph.set(kGraphOps, attention);
  graph.set(kGraphHandle, kHandle, *handle);
  graph.finish();

  Descriptor heuristic(lib, kHeuristic);
  heuristic.set(kHeuristicGraph, graph);
  heuristic.set(kHeuristicModeOf, kHeuristicMode, kModeA);
  std::vector<Descriptor> configs;
  std::vector<void*> objects;
  for (std::int64_t i = 0; i < kMostConfigs; ++i) objects.push_back(configs.emplace_back(lib, kEngineConfig).get());
  std::int64_t found = 0;
  int error = heuristic.finish();
  if (!error) error = lib.get(heuristic.get(), kHeuristicResults, kDescriptor, kMostConfigs, &found, objects.data());
  for (std::int64_t i = 0; i < found && !error; ++i) {  // best first
    Descriptor plan(lib, kPlan);
    plan.set(kPlanHandle, kHandle, *handle);
    plan.set(kPlanConfig, kDescriptor, objects[static_cast<std::size_t>(i)]);
    if (plan.finish() == 0) return finished(std::move(plan));
  }
  return unavailable("[cudnn] no plan for attention with " + std::to_string(s.heads) + " heads of " +
                     std::to_string(s.head_dim) + " from " + std::to_string(s.tokens) + " to " +
                     std::to_string(s.key_tokens) + " tokens: status " + std::to_string(error));
}

Result<std::shared_ptr<const Cudnn::Plan>> Cudnn::finished(Descriptor plan) const {
  std::int64_t bytes = 0, count = 0;
  if (const int e = library_->get(plan.get(), kPlanWorkspace, kInt64, 1, &count, &bytes); e != 0)
    return unavailable("[cudnn] cannot query the workspace size of a plan: status " + std::to_string(e));
  return std::make_shared<const Plan>(std::move(plan), bytes);
}

Result<std::string> Cudnn::save(const Plan& plan) const {
  std::int64_t bytes = 0;
  int e = library_->get(plan.descriptor.get(), kPlanJson, kChar, 0, &bytes, nullptr);
  std::string text(static_cast<std::size_t>(e ? 0 : bytes), '\0');
  if (!e) e = library_->get(plan.descriptor.get(), kPlanJson, kChar, bytes, &bytes, text.data());
  if (e) return unavailable("[cudnn] cannot serialize a plan: status " + std::to_string(e));
  return text;
}

Result<std::shared_ptr<const Cudnn::Plan>> Cudnn::restore(const std::string& saved) const {
  std::lock_guard lock(planning_);
  const auto handle = planner();
  if (!handle) return handle.error();
  Descriptor plan(*library_, kPlan);
  plan.set(kPlanJson, kChar, static_cast<std::int64_t>(saved.size()), saved.data());
  plan.set(kPlanHandle, kHandle, *handle);
  if (const int e = plan.finish(); e != 0)
    return unavailable("[cudnn] cannot restore a saved plan: status " + std::to_string(e));
  return finished(std::move(plan));
}

std::int64_t Cudnn::workspace_bytes(const Plan& plan) { return plan.workspace; }

Result<void> Cudnn::run(const Plan& plan, const AttentionOperands& o, float scale, void* workspace,
                        void* stream) const {
  const std::int64_t ids[] = {kQ, kK, kV, kOut, kScale};
  const void* pointers[] = {o.q, o.k, o.v, o.out, &scale};
  Descriptor pack(*library_, kVariantPack);
  pack.set(kPackIds, kInt64, 5, ids);
  pack.set(kPackPointers, kPointer, 5, pointers);
  pack.set(kPackWorkspace, kPointer, workspace);
  int e = pack.finish();
  std::lock_guard lock(mutex_);
  if (!e) e = library_->set_stream(handle_, stream);
  if (!e) e = library_->execute(handle_, plan.descriptor.get(), pack.get());
  if (e) return Error{Code::kDeviceFault, "[cudnn] attention failed: status " + std::to_string(e)};
  return {};
}

}  // namespace ditfleet::region
