# Every outside library is found here and nowhere else.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Boost 1.81 REQUIRED)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(CURL REQUIRED)
pkg_check_modules(hiredis REQUIRED IMPORTED_TARGET hiredis)
pkg_check_modules(sodium REQUIRED IMPORTED_TARGET libsodium)

if(DITFLEET_PIPELINE)
  pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET sentencepiece)
  pkg_check_modules(icu REQUIRED IMPORTED_TARGET icu-uc)
  pkg_check_modules(webp REQUIRED IMPORTED_TARGET libwebp)
  find_package(PNG REQUIRED)
  find_package(JPEG REQUIRED)

  # LibTorch without its own CMake package, which insists on a CUDA toolkit.
  if(NOT DITFLEET_LIBTORCH AND DEFINED ENV{DITFLEET_LIBTORCH})
    set(DITFLEET_LIBTORCH "$ENV{DITFLEET_LIBTORCH}")
  endif()
  if(NOT EXISTS "${DITFLEET_LIBTORCH}/include/ATen/ATen.h" OR NOT EXISTS "${DITFLEET_LIBTORCH}/lib/libtorch_cpu.so")
    message(FATAL_ERROR "DITFLEET_LIBTORCH is '${DITFLEET_LIBTORCH}', which lacks include/ATen/ATen.h or lib/libtorch_cpu.so; deploy/setup.sh fetches LibTorch and passes its folder")
  endif()
  add_library(ditfleet_torch INTERFACE)
  target_compile_options(ditfleet_torch INTERFACE
    "SHELL:-idirafter ${DITFLEET_LIBTORCH}/include" "SHELL:-idirafter ${DITFLEET_LIBTORCH}/include/torch/csrc/api/include")
  target_link_directories(ditfleet_torch INTERFACE ${DITFLEET_LIBTORCH}/lib)
  # torch_cpu alone: the CUDA libraries are loaded at run time where there is a GPU (pipeline/README.md).
  target_link_options(ditfleet_torch INTERFACE LINKER:--allow-shlib-undefined)
  target_link_libraries(ditfleet_torch INTERFACE -Wl,--no-as-needed torch_cpu c10 -Wl,--as-needed)
endif()

if(DITFLEET_TESTS)
  find_package(GTest REQUIRED)
endif()
