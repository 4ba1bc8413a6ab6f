# Wrong values for the roles, one at a time. See refused.tftest.hcl.

run "an_unknown_access_by_pod_identity" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s", access = "admin" } }
  }

  expect_failures = [var.pod_identities]
}

run "a_role_of_65_characters_by_pod_identity" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    pod_identities = { rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.pod_identities]
}

run "one_name_for_two_roles" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    irsa           = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s" } }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_unknown_access_by_irsa" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "admin" } }
  }

  expect_failures = [var.irsa]
}

run "a_role_of_65_characters_by_irsa" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_issuer_for_its_arn" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "https://oidc", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_issuer_of_no_account" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::1111:oidc-provider/o", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_issuer_without_a_name" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "every_service_account" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "*" } }
  }

  expect_failures = [var.irsa]
}

run "service_accounts_of_one_more_character" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s?" } }
  }

  expect_failures = [var.irsa]
}

run "every_namespace" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "*", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "namespaces_of_one_more_character" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n?", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "a_cleaner_without_the_switch_by_pod_identity" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s", access = "cleaner" } }
  }

  expect_failures = [var.pod_identities]
}

run "a_cleaner_without_the_switch_by_irsa" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache"
    irsa = { a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "cleaner" } }
  }

  expect_failures = [var.irsa]
}

run "a_budget_that_no_role_may_keep" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    cleaner        = true
    settings       = { bucket_bytes = "10TiB" }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }

  expect_failures = [var.irsa]
}

run "an_idle_time_that_no_role_may_keep" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name     = "cache"
    cleaner  = true
    settings = { bucket_idle_s = 86400 }
    irsa = {
      a = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s" }
      b = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "t", access = "reader" }
    }
  }

  expect_failures = [var.irsa]
}
