# What a build of this room alone has besides its libraries: the benchmark and the tests that need no
# package.
set(root ${CMAKE_CURRENT_SOURCE_DIR}/../..)
if(EXISTS ${root}/bench/kvx_bench.c)
  add_executable(kvx_bench ${root}/bench/kvx_bench.c)
  target_link_libraries(kvx_bench PRIVATE kv_kvx)
  set_target_properties(kvx_bench PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
endif()
if(EXISTS ${root}/tests/kvx/test_matrix.c)
  add_executable(test-kvx-matrix ${root}/tests/kvx/test_matrix.c)
  target_link_libraries(test-kvx-matrix PRIVATE kv_kvx)
  target_include_directories(test-kvx-matrix PRIVATE ${root}/tests)
  add_test(NAME kvx.matrix COMMAND test-kvx-matrix)
endif()
