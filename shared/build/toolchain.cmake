# Compiler and linker flags that hold for every target.

# -O3, CMake's own choice, makes a build longer and nothing faster here: what computes is generated, or a library's.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(DITFLEET_CCACHE ccache)
if(DITFLEET_CCACHE)
  # One cache serves every checkout: paths below the tree count as relative to it. A miss does not preprocess the file
  # first (CCACHE_DEPEND). The sloppiness is what ccache wants for precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${DITFLEET_CCACHE})
endif()
find_program(DITFLEET_MOLD mold)
if(DITFLEET_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_link_options(-fuse-ld=mold)
endif()

add_compile_options(-Wall -Wextra -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 reports false positives inside Boost, its own coroutine frames and strings.
  add_compile_options(-Wno-maybe-uninitialized -Wno-mismatched-new-delete -Wno-restrict)
endif()

if(DITFLEET_SANITIZE STREQUAL "address")
  add_compile_options(-O1 -UNDEBUG -g1 -fno-omit-frame-pointer
    -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(DITFLEET_SANITIZE STREQUAL "thread")
  # The sanitizer knows no fences, which Asio has beside its locks.
  add_compile_definitions(BOOST_ASIO_DISABLE_FENCED_BLOCK)
  add_compile_options(-O1 -UNDEBUG -g1 -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(DITFLEET_SANITIZE)
  message(FATAL_ERROR "DITFLEET_SANITIZE is '${DITFLEET_SANITIZE}'; it takes address or thread")
endif()

if(DITFLEET_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "DITFLEET_FUZZ needs libFuzzer, which comes with Clang; pass -DCMAKE_CXX_COMPILER=clang++-16")
  endif()
  # no-link: libFuzzer's main goes into the fuzz targets alone.
  add_compile_options(-O1 -UNDEBUG -g1 -fno-omit-frame-pointer
    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
endif()
