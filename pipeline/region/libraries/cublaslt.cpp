#include "pipeline/region/libraries/cublaslt.h"
#include "pipeline/device/symbols.h"

#include <cstring>

namespace ditfleet::region {
namespace {

using pipeline::bind;

// Constants and structures of cublasLt.h and library_types.h of CUDA 13.
enum : int { kReal32 = 0, kBFloat16 = 14, kE4M3 = 28 };
constexpr int kCompute32 = 68;
constexpr std::int32_t kTransposed = 1;
constexpr std::int32_t kScalePerRow = 3;  // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
enum DescAttribute : int {
  kTransA = 3,
  kEpilogue = 7,
  kBiasPointer = 8,
  kScaleA = 17,
  kScaleB = 18,
  kFastSums = 25,  // fp8 only
  kBiasType = 26,
  kScaleModeA = 31,
  kScaleModeB = 32
};
enum : std::uint32_t { kNoEpilogue = 1, kWithBias = 4, kWithGeluAndBias = 36 };
enum PreferenceAttribute : int { kWorkspace = 1, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
struct Heuristic {
  std::uint64_t algorithm[8];
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int data_type(ElementType type) {
  return type == ElementType::kF32 ? kReal32 : type == ElementType::kBF16 ? kBFloat16 : kE4M3;
}

}  // namespace

struct CublasLt::Library {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(void** desc, int compute, int scale);
  int (*desc_destroy)(void* desc);
  int (*desc_set)(void* desc, int attribute, const void* value, std::size_t bytes);
  int (*layout_create)(void** layout, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_destroy)(void* preference);
  int (*preference_set)(void* preference, int attribute, const void* value, std::size_t bytes);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                   Heuristic* results, int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                const void* algorithm, void* workspace, std::size_t workspace_bytes, void* stream);
};

// One product as the library describes it. cuBLASLt is column-major: for row-major data it computes outᵀ = weight · xᵀ.
struct CublasLt::Descriptors {
  Descriptors(const Library& l, const GemmShape& s, const GemmOperands& o) : lib(l) {
    const bool biased = s.epilogue != GemmEpilogue::kPlain;
    const std::uint32_t epilogue = !biased                             ? kNoEpilogue
                                   : s.epilogue == GemmEpilogue::kBias ? kWithBias
                                                                       : kWithGeluAndBias;
    const std::int32_t type = data_type(s.type), operand_type = s.f8 ? kE4M3 : type;
    const auto u = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
    error = lib.desc_create(&desc, kCompute32, kReal32);
    if (!error) error = lib.desc_set(desc, kTransA, &kTransposed, sizeof kTransposed);
    if (!error) error = lib.desc_set(desc, kEpilogue, &epilogue, sizeof epilogue);
    if (!error && biased) error = lib.desc_set(desc, kBiasPointer, &o.bias, sizeof o.bias);
    if (!error && biased) error = lib.desc_set(desc, kBiasType, &type, sizeof type);
    if (s.f8) {
      const std::int8_t fast = 1;
      if (!error) error = lib.desc_set(desc, kFastSums, &fast, sizeof fast);
      for (const DescAttribute mode : {kScaleModeA, kScaleModeB})
        if (!error) error = lib.desc_set(desc, mode, &kScalePerRow, sizeof kScalePerRow);
      if (!error) error = lib.desc_set(desc, kScaleA, &o.weight_scales, sizeof o.weight_scales);
      if (!error) error = lib.desc_set(desc, kScaleB, &o.x_scales, sizeof o.x_scales);
    }
    if (!error) error = lib.layout_create(&weight, operand_type, u(s.in), u(s.out), s.weight_stride);
    if (!error) error = lib.layout_create(&x, operand_type, u(s.in), u(s.rows), s.x_stride);
    if (!error) error = lib.layout_create(&out, type, u(s.out), u(s.rows), s.out_stride);
  }
  ~Descriptors() {
    if (out) lib.layout_destroy(out);
    if (x) lib.layout_destroy(x);
    if (weight) lib.layout_destroy(weight);
    if (desc) lib.desc_destroy(desc);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  const Library& lib;
  void *desc = nullptr, *weight = nullptr, *x = nullptr, *out = nullptr;
  int error = 0;
};

Result<const CublasLt::Library*> CublasLt::library() {
  // LibTorch's CUDA part has loaded it already, so its name alone finds it.
  static const Library* const opened =
      pipeline::open_library<Library>("libcublasLt.so.13", [](void* library, Library& t) {
        return bind(library, "cublasLtCreate", t.create) && bind(library, "cublasLtDestroy", t.destroy) &&
               bind(library, "cublasLtMatmulDescCreate", t.desc_create) &&
               bind(library, "cublasLtMatmulDescDestroy", t.desc_destroy) &&
               bind(library, "cublasLtMatmulDescSetAttribute", t.desc_set) &&
               bind(library, "cublasLtMatrixLayoutCreate", t.layout_create) &&
               bind(library, "cublasLtMatrixLayoutDestroy", t.layout_destroy) &&
               bind(library, "cublasLtMatmulPreferenceCreate", t.preference_create) &&
               bind(library, "cublasLtMatmulPreferenceDestroy", t.preference_destroy) &&
               bind(library, "cublasLtMatmulPreferenceSetAttribute", t.preference_set) &&
               bind(library, "cublasLtMatmulAlgoGetHeuristic", t.heuristic) &&
               bind(library, "cublasLtMatmul", t.matmul);
      });
  if (!opened) return unavailable("[cublaslt] cannot load libcublasLt.so.13, a part of LibTorch with CUDA");
  return opened;
}

Result<std::shared_ptr<const CublasLt>> CublasLt::open() {
  auto lib = library();
  if (!lib) return lib.error();
  std::shared_ptr<CublasLt> made(new CublasLt);
  made->library_ = *lib;
  if (int e = (*lib)->create(&made->handle_); e != 0)
    return Error{Code::kDeviceFault, "[cublaslt] cannot create a handle: status " + std::to_string(e)};
  return std::shared_ptr<const CublasLt>(std::move(made));
}

CublasLt::~CublasLt() {
  if (handle_) library_->destroy(handle_);
}

Result<GemmAlgorithm> CublasLt::algorithm(const GemmShape& s, const GemmOperands& o,
                                          std::uint64_t workspace_bytes) const {
  const Descriptors d(*library_, s, o);
  void* preference = nullptr;
  int e = d.error ? d.error : library_->preference_create(&preference);
  const std::size_t cap = workspace_bytes;
  if (!e) e = library_->preference_set(preference, kWorkspace, &cap, sizeof cap);
  const std::uint32_t x = s.alignment[0], weight = s.alignment[1], out = s.alignment[2];
  for (const auto& [attribute, bytes] : {std::pair(kAlignmentA, weight), std::pair(kAlignmentB, x),
                                         std::pair(kAlignmentC, out), std::pair(kAlignmentD, out)})
    if (!e) e = library_->preference_set(preference, attribute, &bytes, sizeof bytes);
  Heuristic found;
  int count = 0;
  if (!e) e = library_->heuristic(handle_, d.desc, d.weight, d.x, d.out, d.out, preference, 1, &found, &count);
  if (preference) library_->preference_destroy(preference);
  if (e || count == 0 || found.state != 0)
    return unavailable("[cublaslt] no algorithm for the product of [" + std::to_string(s.rows) + ", " +
                       std::to_string(s.in) + "] and [" + std::to_string(s.out) + ", " + std::to_string(s.in) +
                       "]: status " + std::to_string(e));
  GemmAlgorithm made{.workspace_bytes = found.workspace};
  std::memcpy(made.words.data(), found.algorithm, sizeof found.algorithm);
  return made;
}

Result<void> CublasLt::run(const GemmShape& s, const GemmOperands& o, const GemmAlgorithm& algorithm, void* workspace,
                           void* stream) const {
  const Descriptors d(*library_, s, o);
  const float one = 1, beta = s.accumulates ? 1 : 0;
  int e = d.error;
  if (!e)
    e = library_->matmul(handle_, d.desc, &one, o.weight, d.weight, o.x, d.x, &beta, o.out, d.out, o.out, d.out,
                         algorithm.words.data(), workspace, algorithm.workspace_bytes, stream);
  if (e != 0) return Error{Code::kDeviceFault, "[cublaslt] cannot launch a product: status " + std::to_string(e)};
  return {};
}

}  // namespace ditfleet::region
