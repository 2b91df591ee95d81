# ditfleet_library(NAME SOURCES… LINK …): a static library whose includes start at the tree's root
# ("shared/core/result.h").
function(ditfleet_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  if(arg_SOURCES)
    add_library(${name} STATIC ${arg_SOURCES})
    target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} PUBLIC ${arg_LINK})
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} INTERFACE ${arg_LINK})
  endif()
endfunction()

# ditfleet_rarely_runs(TARGET): compiled with -O1, which takes a fifth less time. For code that is not in the path of a
# step, of a scheduler's decision or of a request's bytes.
function(ditfleet_rarely_runs target)
  if(NOT DITFLEET_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

# ditfleet_with_torch(TARGET): uses the precompiled headers of ditfleet_pipeline. LibTorch's headers take two thirds of the
# time of a small file.
function(ditfleet_with_torch target)
  target_precompile_headers(${target} REUSE_FROM ditfleet_pipeline)
  target_compile_options(${target} PRIVATE -fpch-preprocess)
endfunction()

# What the tests with one label need, as the target tests_LABEL: tests/run.sh builds by it.
function(ditfleet_label_targets labels)
  foreach(label IN LISTS labels)
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
      if(label MATCHES "^(system|fault|bench|release|gpu)$")
        add_dependencies(tests_${label} ditfleet)
        if(TARGET ditfleet-worker)
          add_dependencies(tests_${label} ditfleet-worker)
        endif()
      endif()
    endif()
    if(ARGN)
      add_dependencies(tests_${label} ${ARGN})
    endif()
  endforeach()
endfunction()

# ditfleet_test(NAME LABELS unit SOURCES … LINK … [TIMEOUT seconds] [SANITIZE kind…]): one GoogleTest binary, one
# CTest entry. Tests with a long limit start first, so that none is left alone at the end. SANITIZE: the sanitizers
# that tests/run.sh also runs it under; address for every unit test.
function(ditfleet_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES;LINK;SANITIZE" ${ARGN})
  if("unit" IN_LIST arg_LABELS)
    list(APPEND arg_SANITIZE address)
  endif()
  list(TRANSFORM arg_SANITIZE PREPEND sanitize_ OUTPUT_VARIABLE sanitize_labels)
  list(APPEND arg_LABELS ${sanitize_labels})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_LINK} ditfleet_test_main)
  ditfleet_rarely_runs(${name})
  if(arg_LINK MATCHES "ditfleet_(pipeline|golden|region_inputs)(;|$)")
    ditfleet_with_torch(${name})
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} COST ${arg_TIMEOUT})
  ditfleet_label_targets("${arg_LABELS}" ${name})
endfunction()
