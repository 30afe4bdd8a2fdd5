# make install [DESTDIR=] and make uninstall: programs, libraries, headers, pkg-config, CMake package.
include(CMakePackageConfigHelpers)

get_property(libraries GLOBAL PROPERTY KV_LIBRARIES)
get_property(programs GLOBAL PROPERTY KV_PROGRAMS)

if(NOT libraries OR NOT programs)
  return()
endif()

install(TARGETS ${programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS ${libraries} EXPORT kvasir LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
file(GLOB pages ${CMAKE_SOURCE_DIR}/docs/man/*.[1-8])
install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${KV_PUBLIC_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${CMAKE_BINARY_DIR}/pkgconfig/ DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
# They name the prefix of the configuration; `make install PREFIX=` chooses another one later.
install(CODE "file(GLOB pcs \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig/kv*.pc\")
  foreach(pc \${pcs})
    file(READ \"\${pc}\" text)
    string(REGEX REPLACE \"^prefix=[^\n]*\" \"prefix=\${CMAKE_INSTALL_PREFIX}\" text \"\${text}\")
    file(WRITE \"\${pc}\" \"\${text}\")
  endforeach()")
install(EXPORT kvasir NAMESPACE kvasir:: FILE kvasir-targets.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvasir)
file(WRITE ${CMAKE_BINARY_DIR}/kvasir-config.cmake
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/kvasir-targets.cmake\")\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvasir-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvasir-config.cmake ${CMAKE_BINARY_DIR}/kvasir-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvasir)

add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -DMANIFEST=${CMAKE_BINARY_DIR}/install_manifest.txt
                  -P ${CMAKE_SOURCE_DIR}/cmake/uninstall.cmake)
